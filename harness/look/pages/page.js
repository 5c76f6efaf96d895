(function () {
  'use strict';
  // ---- dark or light: as the system says, until the reader says otherwise
  var root = document.documentElement;
  function remembered(value) { // a page in a frame or from a file may not be allowed to remember
    try {
      if (value === undefined) return localStorage.getItem('theme');
      localStorage.setItem('theme', value);
    } catch (e) { /* then it does not */ }
    return null;
  }
  var said = remembered();
  if (said === 'dark' || said === 'light') root.dataset.theme = said;
  function isDark() {
    return root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme:dark)').matches;
  }
  function showTheme() {
    var button = document.getElementById('theme');
    if (!button) return;
    button.hidden = false;
    button.textContent = isDark() ? 'light' : 'dark';
  }
  document.addEventListener('click', function (e) {
    if (!e.target.closest || !e.target.closest('#theme')) return;
    root.dataset.theme = isDark() ? 'light' : 'dark';
    remembered(root.dataset.theme);
    showTheme();
  });
  showTheme();
  window.addEventListener('harness-content', showTheme);
  matchMedia('(prefers-color-scheme:dark)').addEventListener('change', showTheme);

  // ---- on paper nothing can be opened
  var opened = [];
  window.addEventListener('beforeprint', function () {
    opened = Array.prototype.filter.call(document.querySelectorAll('.breaks details'), function (d) { return !d.open; }).slice(0, 12);
    opened.forEach(function (d) { d.open = true; });
  });
  window.addEventListener('afterprint', function () {
    opened.forEach(function (d) { d.open = false; });
  });

  // ---- words at the pointer
  var tip = document.getElementById('tip'), shown = null;
  function show(text, e) {
    tip.textContent = text;
    tip.hidden = false;
    var w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - w - 6)) + 'px';
    var above = e.pointerType === 'touch' ? e.clientY - h - 26 : -1; // not under the finger
    var below = e.clientY + 18 + h > innerHeight ? Math.max(2, e.clientY - h - 10) : e.clientY + 18;
    tip.style.top = (above >= 0 ? above : below) + 'px';
  }
  function hide() {
    tip.hidden = true;
    if (shown) shown.setAttribute('visibility', 'hidden');
    shown = null;
  }

  // Titles in pictures are for readers without scripts; here they become words at the pointer,
  // which a finger can reach too.
  function takeTitles() {
    document.querySelectorAll('main svg title').forEach(function (t) {
      if (t.parentNode.tagName !== 'svg') t.parentNode.setAttribute('data-tip', t.textContent);
      t.remove();
    });
  }
  takeTitles();
  window.addEventListener('harness-content', takeTitles);

  // ---- values of plots
  var known = new WeakMap();
  function dataOf(svg) {
    if (!known.has(svg)) {
      var block = svg.nextElementSibling;
      known.set(svg, block && block.type === 'application/json' ? JSON.parse(block.textContent) : null);
    }
    return known.get(svg);
  }
  function nearest(xs, x) {
    var low = 0, high = xs.length - 1;
    while (high - low > 1) {
      var mid = (low + high) >> 1;
      if (xs[mid] <= x) low = mid; else high = mid;
    }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  }
  function digits(v) {
    var a = Math.abs(v);
    if (a >= 1e15 || (a && a < 1e-4)) return v.toExponential(3);
    if (a >= 1e4) return Math.round(v).toLocaleString('en');
    return String(+v.toPrecision(5));
  }
  function value(v, unit) {
    if (unit === '$') return '$' + digits(v);
    if (unit === 'B/s') {
      var i = 0;
      while (Math.abs(v) >= 1000 && i < 4) { v /= 1000; i++; }
      return +v.toPrecision(3) + ' ' + ['B', 'kB', 'MB', 'GB', 'TB'][i] + '/s';
    }
    return digits(v) + (unit ? ' ' + unit : '');
  }
  function when(s) {
    if (s < 120) return s.toFixed(1) + ' s';
    if (s < 7200) return Math.floor(s / 60) + ' min ' + Math.floor(s % 60) + ' s';
    if (s < 172800) return Math.floor(s / 3600) + ' h ' + Math.floor(s % 3600 / 60) + ' min';
    return Math.floor(s / 86400) + ' d ' + Math.floor(s % 86400 / 3600) + ' h';
  }
  function lines(d, pointer) { // [the nearest place where something was measured, what was]
    var span = (d.x1 - d.x0) * 0.02, found = [], at = null;
    d.traces.forEach(function (t) {
      var x = t.x[nearest(t.x, pointer)];
      if (!t.h && (at === null || Math.abs(x - pointer) < Math.abs(at - pointer))) at = x;
    });
    if (at === null) at = pointer;
    d.traces.forEach(function (t) {
      var i = nearest(t.x, at);
      if (t.h) while (i > 0 && t.x[i] > at) i--;
      if (t.h ? t.x[i] > at : Math.abs(t.x[i] - at) > span) return;
      found.push(t.n + '  ' + (t.z ? value(t.z[i], '') + ' – ' : '') + value(t.y[i], t.u));
    });
    return [at, found];
  }
  function overPlot(svg, e) {
    var d = dataOf(svg);
    if (!d) return;
    var box = svg.getBoundingClientRect(), u = (e.clientX - box.left) / box.width * d.width;
    var x = d.x0 + (u - d.left) / (d.right - d.left) * (d.x1 - d.x0);
    if (x < d.x0 || x > d.x1) { hide(); return; }
    var both = lines(d, x), at = both[0], words = both[1];
    if (!words.length) { hide(); return; }
    words.unshift(d.time ? 'after ' + when(at) : d.name + ' ' + digits(at));
    d.shades.forEach(function (s) { if (s[0] <= at && at <= s[1]) words.push(s[2]); });
    var cross = svg.querySelector('.cross'), where = d.left + (at - d.x0) / (d.x1 - d.x0) * (d.right - d.left);
    if (shown && shown !== cross) shown.setAttribute('visibility', 'hidden');
    shown = cross;
    cross.setAttribute('x1', where);
    cross.setAttribute('x2', where);
    cross.setAttribute('visibility', 'visible');
    show(words.join('\n'), e);
  }
  function over(e) {
    if (!e.target.closest) return;
    var svg = e.target.closest('svg.plot'), one = e.target.closest('[data-tip]');
    if (svg) overPlot(svg, e);
    else if (one) { hide(); show(one.getAttribute('data-tip'), e); }
    else if (!tip.hidden) hide();
  }
  document.addEventListener('pointermove', over);
  document.addEventListener('pointerdown', over);
  document.addEventListener('pointerleave', function (e) {
    if (e.pointerType === 'mouse') hide(); // a finger that was lifted leaves the words there
  });
  document.addEventListener('scroll', hide, { capture: true, passive: true });
})();
