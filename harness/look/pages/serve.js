(function () {
  'use strict';
  var POLL_MS = 2000, CURVES_MS = 4000, SOON_MS = 700, FIRST_CHOSEN = 4;
  var state = { runs: [], sort: 0, only: '', down: true, chosen: null, tags: {}, curves: [], soon: true, asked: 0 };
  function el(id) { return document.getElementById(id); }
  function make(tag, cls, text) {
    var e = document.createElement(tag);
    if (cls) e.className = cls;
    if (text !== undefined && text !== null) e.textContent = text;
    return e;
  }

  // ---- words
  function money(v) {
    if (v == null) return '–';
    return v && Math.abs(v) < 0.1 ? '$' + v.toFixed(4) : '$' + v.toLocaleString('en', { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  }
  function number(v) { return v == null ? '–' : Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString('en') : String(+v.toPrecision(5)); }
  function whole(v) { return v == null ? '–' : Math.round(v).toLocaleString('en'); }
  function percent(v) { return v == null ? '–' : (100 * v).toFixed(1) + ' %'; }
  function since(s) {
    if (s == null) return '–';
    s = Math.max(0, Math.round(s));
    if (s < 100) return s + ' s';
    if (s < 6000) return Math.round(s / 60) + ' min';
    if (s < 172800) return Math.round(s / 3600) + ' h';
    return Math.round(s / 86400) + ' d';
  }
  function age(r) { return r.updated_s == null ? null : Date.now() / 1000 - r.updated_s; }

  // ---- asking
  function ask(url, then) {
    var had = state.tags[url];
    return fetch(url, had ? { headers: { 'If-None-Match': had.tag } } : {}).then(function (r) {
      if (r.status === 304 && had) return had.body;
      if (!r.ok) throw new Error(r.status);
      return r.json().then(function (body) {
        if (Object.keys(state.tags).length > 20) state.tags = {};
        state.tags[url] = { tag: r.headers.get('ETag'), body: body };
        return body;
      });
    }).then(then);
  }
  function again(f, ms) {
    function once() {
      if (document.hidden) { setTimeout(once, ms); return; }
      Promise.resolve(f()).catch(function (e) { problem('the server does not answer (' + e.message + ')'); })
        .then(function () { setTimeout(once, state.soon ? SOON_MS : ms); });
    }
    once();
  }
  function problem(text) {
    el('problem').hidden = !text;
    el('problem').textContent = text || '';
  }

  // ---- the table
  var ALERTS = { info: 0, warning: 1, critical: 2 };
  function worst(r) {
    return (r.firing || []).reduce(function (w, a) { return Math.max(w, ALERTS[a.severity] + 1); }, 0) * 1e6 + (r.alerts_fired || 0);
  }
  var COLUMNS = [
    ['', null, pick], ['run', function (r) { return r.id; }, nameCell], ['state', function (r) { return r.state || ''; }, stateCell],
    ['step', function (r) { return r.step; }, stepCell, 1], ['loss', function (r) { return r.loss; }, text(number), 1],
    ['validation', function (r) { return r.validation; }, text(number), 1],
    ['tokens/s', function (r) { return r.tokens_per_s; }, text(whole), 1], ['MFU', function (r) { return r.mfu; }, text(percent), 1],
    ['ranks', function (r) { return r.world; }, worldCell, 1],
    ['region', places('regions'), text(words)], ['instance', places('instances'), text(words)],
    ['$/h', function (r) { return r.usd_per_h; }, dollars, 1], ['spent', function (r) { return r.spent_usd; }, dollars, 1],
    ['$/M tokens', function (r) { return r.usd_per_million_tokens; }, dollars, 1],
    ['goodput', function (r) { return r.goodput; }, text(percent), 1], ['alerts', worst, alertCell],
    ['last heartbeat', function (r) { return age(r) == null ? null : -age(r); }, function (c, r) { c.textContent = since(age(r)); }, 1],
    ['started', function (r) { return r.started_s; }, startCell, 1], ['tags', places('people'), text(words)],
    ['notes', function (r) { return r.notes || null; }, noteCell, 1],
    ['status', function (r) { return r.decision ? r.decision.reason : ''; }, whyCell]
  ];
  var STARTED = COLUMNS.map(function (c) { return c[0]; }).indexOf('started'), FIXED = COLUMNS.length, MOST_CONFIG = 6;
  function text(words) {
    return function (cell, r, of) { cell.textContent = words(of(r)); };
  }
  function places(name) { return function (r) { return (r[name] || []).join(', '); }; }
  function words(v) { return v || '–'; }
  function dollars(cell, r, of) {
    cell.textContent = money(of(r));
    if (!r.simulated || of(r) == null) return;
    cell.append(make('small', '', 'simulated'));
  }
  function noteCell(cell, r) {
    cell.textContent = r.notes ? String(r.notes) : '–';
    var tip = [r.purpose, r.note].filter(Boolean).join('\n');
    if (tip) cell.setAttribute('data-tip', tip);
  }
  // a column for each value of the configuration that differs between the runs
  function hyperparameters() {
    var values = {}, runs = state.runs.filter(function (r) { return r.config; });
    runs.forEach(function (r) { Object.keys(r.config).forEach(function (k) { values[k] = values[k] || {}; values[k][r.config[k]] = 1; }); });
    var names = Object.keys(values).filter(function (k) {
      return Object.keys(values[k]).length > 1 || runs.some(function (r) { return !(k in r.config); });
    }).slice(0, MOST_CONFIG);
    if (names.join() === COLUMNS.slice(FIXED).map(function (c) { return c[0]; }).join()) return;
    COLUMNS.length = FIXED;
    names.forEach(function (k) {
      COLUMNS.push([k, function (r) {
        var v = r.config && r.config[k];
        return v == null ? null : v !== '' && isFinite(v) ? +v : v;
      }, text(function (v) { return v == null ? '–' : String(v); }), 1]);
    });
    if (state.sort >= COLUMNS.length) state.sort = STARTED;
    head();
  }
  function states() {
    var found = state.runs.map(function (r) { return r.state || ''; }).filter(Boolean);
    if (state.only) found.push(state.only);
    var names = found.filter(function (s, i) { return found.indexOf(s) === i; }).sort(), box = el('only');
    if (names.join() === Array.prototype.slice.call(box.options, 1).map(function (o) { return o.value; }).join()) return;
    box.replaceChildren.apply(box, [''].concat(names).map(function (s) { var o = make('option', '', s || 'all'); o.value = s; return o; }));
    box.value = state.only;
  }
  function pick(cell, r) {
    var box = make('input');
    box.type = 'checkbox';
    box.checked = state.chosen.indexOf(r.id) >= 0;
    box.setAttribute('aria-label', 'curve of ' + r.id);
    box.addEventListener('change', function () {
      state.chosen = state.chosen.filter(function (n) { return n !== r.id; });
      if (box.checked) state.chosen.push(r.id);
      remember();
      readCurves();
    });
    cell.append(box);
  }
  function nameCell(cell, r) {
    var link = make('a', '', r.id);
    link.href = '/run/' + encodeURIComponent(r.id);
    cell.append(link);
  }
  function stateCell(cell, r) {
    var tones = { done: 'good', finished: 'good', failed: 'bad', stopped: 'warn', training: 'live' };
    var words = r.state || (r.problem ? 'not readable' : 'reading …');
    var tone = tones[r.state] || (r.state && /^waiting/.test(r.state) ? 'waiting' : r.state ? 'live' : 'old');
    var pill = make('span', 'pill ' + tone, words);
    var why = [r.reason, r.problem].filter(Boolean).join('\n');
    if (why) pill.setAttribute('data-tip', why);
    cell.append(pill);
  }
  function stepCell(cell, r) {
    cell.append(make('span', '', whole(r.step) + (r.total ? ' of ' + whole(r.total) : '')));
    if (!r.total) return;
    var bar = make('span', 'bar'), part = make('i');
    part.style.width = Math.min(100, 100 * (r.step || 0) / r.total).toFixed(1) + '%';
    bar.append(part);
    cell.append(bar);
  }
  function worldCell(cell, r) {
    cell.textContent = r.world ? r.world + (r.nodes ? ' on ' + r.nodes : '') : r.over ? '–' : '0';
    if (r.world) cell.setAttribute('data-tip', r.world + ' ranks on ' + r.nodes + ' nodes' + (r.left ? '\n' + r.left + ' left' : ''));
  }
  function alertCell(cell, r) {
    var titles = {};
    (r.firing || []).forEach(function (a) { titles[a.title] = a; }); // of several the last
    Object.keys(titles).slice(-2).map(function (t) { return titles[t]; }).forEach(function (a) {
      var pill = make('span', 'alert ' + a.severity, a.title);
      pill.setAttribute('data-tip', a.text);
      cell.append(pill, ' ');
    });
    if (!(r.firing || []).length && r.alerts_fired) cell.append(make('span', 'alert past', r.alerts_fired + ' in the past'));
  }
  function startCell(cell, r) {
    cell.textContent = r.started_s ? new Date(r.started_s * 1000).toISOString().slice(0, 16).replace('T', ' ') : '–';
  }
  function whyCell(cell, r) {
    cell.classList.add('why');
    if (r.decision) cell.textContent = r.decision.what + (r.decision.reason ? ': ' + r.decision.reason : '') + ' (' + since(Date.now() / 1000 - r.decision.t) + ' ago)';
    else cell.textContent = r.over ? r.reason || '' : r.problem || '';
  }
  function head() {
    var row = make('tr');
    COLUMNS.forEach(function (c, i) {
      var cell = make('th', c[3] ? 'r' : '', c[0]);
      if (c[1]) {
        cell.tabIndex = 0;
        cell.addEventListener('click', function () { sortBy(i); });
        cell.addEventListener('keydown', function (e) { if (e.key === 'Enter') sortBy(i); });
      }
      row.append(cell);
    });
    el('runs').tHead.replaceChildren(row);
  }
  function sortBy(i) {
    state.down = state.sort === i ? !state.down : Boolean(COLUMNS[i][3]);
    state.sort = i;
    remember();
    table();
  }
  function table() {
    var of = COLUMNS[state.sort][1], find = el('find').value.toLowerCase();
    var shown = state.runs.filter(function (r) {
      var said = [r.id, r.state].concat(r.people || [], r.regions || [], r.instances || [], r.purpose, r.note);
      return (!state.only || r.state === state.only) && (!find || said.filter(Boolean).join(' ').toLowerCase().indexOf(find) >= 0);
    });
    shown.sort(function (a, b) {
      var x = of(a), y = of(b);
      if (x == null || x === '') return y == null || y === '' ? 0 : 1;
      if (y == null || y === '') return -1;
      var d = typeof x === 'string' ? x.localeCompare(y, 'en', { numeric: true }) : x - y;
      return state.down ? -d : d;
    });
    var body = el('runs').tBodies[0], rows = shown.map(function (r) {
      var row = make('tr', !r.over && age(r) > 300 ? 'stale' : '');
      COLUMNS.forEach(function (c) {
        var cell = make('td', c[3] ? 'r' : '');
        c[2](cell, r, c[1]);
        cell.setAttribute('data-name', c[0]);
        if (cell.textContent === '–') cell.classList.add('none');
        row.append(cell);
      });
      return row;
    });
    if (!body.contains(document.activeElement) || document.activeElement.tagName !== 'INPUT') body.replaceChildren.apply(body, rows);
    else { document.activeElement.blur(); body.replaceChildren.apply(body, rows); }
    Array.prototype.forEach.call(el('runs').tHead.rows[0].cells, function (cell, i) {
      if (i === state.sort) cell.setAttribute('aria-sort', state.down ? 'descending' : 'ascending');
      else cell.removeAttribute('aria-sort');
    });
    var all = state.runs.length, noun = all === 1 ? ' run' : ' runs';
    el('count').textContent = (shown.length === all ? '' : shown.length + ' of ') + all + noun;
  }
  function readRows() {
    return ask('/api/runs', function (body) {
      state.runs = body.runs;
      hyperparameters();
      states();
      problem(body.problem || (!body.found ? 'looking for runs here' : body.left_out ? body.left_out + ' more folders are not shown' : !body.runs.length && body.found ? 'there is no run here yet' : ''));
      if (!state.chosen && body.runs.some(function (r) { return r.started_s; })) {
        state.chosen = body.runs.slice().sort(function (a, b) { return (b.started_s || 0) - (a.started_s || 0); })
          .slice(0, FIRST_CHOSEN).map(function (r) { return r.id; });
        readCurves();
      }
      if (!state.chosen) { state.chosen = []; table(); state.chosen = null; } else table();
    });
  }

  // ---- curves
  var W = 1100, H = 330, L = 64, R = 14, T = 12, B = 36;
  function readCurves() {
    var names = state.chosen || [];
    el('curves').hidden = !names.length;
    if (!names.length) return Promise.resolve();
    var query = names.map(function (n) { return 'run=' + encodeURIComponent(n); }).join('&');
    return ask('/api/curves?' + query + '&metric=' + encodeURIComponent(el('metric').value), function (body) {
      state.curves = body.curves;
      state.soon = body.curves.some(function (c) { return !c.y.length; }) && state.asked++ < 60;
      draw();
    });
  }
  function smooth(ys) {
    var w = el('smooth').value / 101, last = null, weight = 0;
    if (!w) return ys;
    return ys.map(function (y) {
      last = (last === null ? 0 : last) * w + (1 - w) * y;
      weight = weight * w + (1 - w);
      return last / weight;
    });
  }
  function ticks(low, high, about) {
    if (!(high > low)) return [low];
    var raw = (high - low) / about, power = Math.pow(10, Math.floor(Math.log10(raw))), found = [];
    var step = [1, 2, 2.5, 5, 10].map(function (m) { return m * power; }).filter(function (s) { return s >= raw * 0.999; })[0];
    for (var i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }
  function svg(tag, attributes, text) {
    var e = document.createElementNS('http://www.w3.org/2000/svg', tag);
    Object.keys(attributes).forEach(function (k) { e.setAttribute(k, attributes[k]); });
    if (text !== undefined) e.textContent = text;
    return e;
  }
  function short(v) {
    var a = Math.abs(v);
    if (a >= 1e9) return +(v / 1e9).toPrecision(3) + 'G';
    if (a >= 1e6) return +(v / 1e6).toPrecision(3) + 'M';
    if (a >= 1e4) return +(v / 1e3).toPrecision(3) + 'k';
    return String(+v.toPrecision(4));
  }
  function draw() {
    var axis = el('axis').value, log = el('log').checked, lines = [];
    state.curves.forEach(function (c) {
      var xs = c[axis] || [];
      if (!xs.length) return;
      var points = smooth(c.y).map(function (y, i) { return [xs[i], y]; }).filter(function (p) { return !log || p[1] > 0; });
      if (points.length) lines.push({ id: c.id, tone: 'k' + state.chosen.indexOf(c.id) % 10, points: points });
    });
    var chart = el('chart'), keys = el('keys');
    keys.replaceChildren.apply(keys, state.chosen.map(function (n, i) {
      var key = make('span'), there = lines.some(function (l) { return l.id === n; });
      key.append(make('u', 'k' + i % 10), n + (there ? '' : ' (nothing yet)'));
      return key;
    }));
    if (!lines.length) { chart.replaceChildren(make('p', 'note', 'nothing to draw yet')); return; }
    W = Math.max(340, Math.min(1400, chart.clientWidth || 1100));
    H = W < 600 ? 240 : 330;
    L = W < 600 ? 46 : 64;
    function f(y) { return log ? Math.log10(y) : y; }
    var all = [].concat.apply([], lines.map(function (l) { return l.points; }));
    var x0 = Math.min.apply(null, all.map(function (p) { return p[0]; })), x1 = Math.max.apply(null, all.map(function (p) { return p[0]; }));
    var y0 = Math.min.apply(null, all.map(function (p) { return f(p[1]); })), y1 = Math.max.apply(null, all.map(function (p) { return f(p[1]); }));
    var pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 1;
    y0 -= pad; y1 += pad;
    if (x1 <= x0) x1 = x0 + 1;
    function px(x) { return L + (x - x0) / (x1 - x0) * (W - L - R); }
    function py(y) { return T + (y1 - f(y)) / (y1 - y0) * (H - T - B); }
    var picture = svg('svg', { 'class': 'plot', viewBox: '0 0 ' + W + ' ' + H, role: 'img', 'aria-label': 'curves of runs' });
    var marks = ticks(y0, y1, 6).map(function (v) { return log ? Math.pow(10, v) : v; });
    if (log) marks = marks.map(function (v) { return +v.toPrecision(2); }).filter(function (v) { return f(v) >= y0 && f(v) <= y1; });
    marks.forEach(function (v) {
      picture.append(svg('line', { 'class': 'grid', x1: L, x2: W - R, y1: py(v), y2: py(v) }), svg('text', { x: L - 8, y: py(v) + 4, 'text-anchor': 'end' }, short(v)));
    });
    ticks(x0, x1, Math.max(3, Math.round(W / 120))).forEach(function (v) {
      picture.append(svg('text', { x: px(v), y: H - B + 17, 'text-anchor': 'middle' }, short(v)));
    });
    picture.append(svg('text', { x: (L + W - R) / 2, y: H - 3, 'text-anchor': 'middle' }, axis));
    lines.forEach(function (l) {
      var d = 'M' + l.points.map(function (p) { return px(p[0]).toFixed(1) + ' ' + py(p[1]).toFixed(1); }).join('L');
      picture.append(svg('path', { 'class': 'line ' + l.tone, d: d }));
    });
    picture.append(svg('line', { 'class': 'cross', y1: T, y2: H - B, visibility: 'hidden' }));
    var data = make('script');
    data.type = 'application/json';
    data.textContent = JSON.stringify({
      x0: x0, x1: x1, left: L, right: W - R, width: W, name: axis, time: false, shades: [],
      traces: lines.map(function (l) {
        return { n: l.id, u: '', x: l.points.map(function (p) { return p[0]; }), y: l.points.map(function (p) { return p[1]; }) };
      })
    });
    chart.replaceChildren(picture, data);
  }

  // ---- what was chosen is kept in the address
  function remember() {
    var words = new URLSearchParams();
    words.set('sort', (state.down ? '-' : '') + state.sort);
    ['metric', 'axis'].forEach(function (n) { words.set(n, el(n).value); });
    if (state.only) words.set('only', state.only);
    if (el('log').checked) words.set('log', '1');
    if (el('smooth').value !== '0') words.set('smooth', el('smooth').value);
    (state.chosen || []).forEach(function (n) { words.append('run', n); });
    history.replaceState(null, '', '#' + words);
  }
  function recall() {
    var words = new URLSearchParams(location.hash.slice(1)), sort = parseInt((words.get('sort') || '').replace('-', ''), 10);
    state.sort = STARTED;
    state.only = words.get('only') || '';
    if (sort > 0 && sort < COLUMNS.length) { state.sort = sort; state.down = words.get('sort')[0] === '-'; }
    ['metric', 'axis'].forEach(function (n) {
      var wanted = words.get(n);
      if (wanted && Array.prototype.some.call(el(n).options, function (o) { return o.value === wanted; })) el(n).value = wanted;
    });
    el('log').checked = words.get('log') === '1';
    if (words.get('smooth')) el('smooth').value = words.get('smooth');
    if (words.has('run')) state.chosen = words.getAll('run').slice(0, 40);
  }
  recall();
  head();
  el('metric').addEventListener('change', function () { remember(); readCurves(); });
  ['axis', 'log', 'smooth'].forEach(function (n) { el(n).addEventListener('input', function () { remember(); draw(); }); });
  el('find').addEventListener('input', table);
  el('only').addEventListener('change', function () { state.only = el('only').value; remember(); table(); });
  window.addEventListener('resize', draw);
  again(readRows, POLL_MS);
  again(readCurves, CURVES_MS);
})();
