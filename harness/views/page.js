(function(){var tip=document.getElementById('tip');
function show(text,e){tip.textContent=text;tip.hidden=false;var w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-w-6))+'px';
tip.style.top=(e.clientY+18+h>innerHeight?e.clientY-h-10:e.clientY+18)+'px';}
function hide(){tip.hidden=true;}
document.addEventListener('pointermove',function(e){if(e.target.closest('#loss'))return;var t=e.target.closest('[data-tip]');
if(t)show(t.getAttribute('data-tip'),e);else hide();});
document.addEventListener('pointerdown',function(e){var t=e.target.closest('[data-tip]');
if(t&&!e.target.closest('#loss'))show(t.getAttribute('data-tip'),e);});
var svg=document.getElementById('loss'),data=document.getElementById('lossdata');if(!svg||!data)return;
var d=JSON.parse(data.textContent),cross=document.getElementById('cross'),inner=d.width-d.left-d.right;
function over(e){var box=svg.getBoundingClientRect(),u=(e.clientX-box.left)/box.width*d.width,step=(u-d.left)/inner*d.last+.5,best=null;
d.rows.forEach(function(r){if(!best||Math.abs(r[0]-step)<Math.abs(best[0]-step))best=r;});if(!best)return;
var x=d.left+(best[0]-.5)/d.last*inner;cross.setAttribute('x1',x);cross.setAttribute('x2',x);
cross.setAttribute('visibility','visible');
var val=best[5]==null?'':'\n'+d.val+' '+(+best[5].toPrecision(6));
var t='step '+best[0]+'\nloss '+best[1]+val+'\nepoch '+best[2]+', '+best[3]+' ranks\n'+best[4]+' s';
var own=e.target.getAttribute&&e.target.getAttribute('class')==='lostband'?e.target.getAttribute('data-tip'):null;
show(own?t+'\n'+own:t,e);}
svg.addEventListener('pointermove',over);svg.addEventListener('pointerdown',over);
svg.addEventListener('pointerleave',function(){cross.setAttribute('visibility','hidden');hide();});})();
