(function () {
  'use strict';
  var POLL_MS = 3000, FIRST_MS = 500;
  var report = document.getElementById('report'), live = document.getElementById('live');
  var base = '/run/' + report.dataset.run, tag = null, rowsTag = null, id = decodeURIComponent(report.dataset.run);

  // Our own server made the content, with all that others wrote escaped; scripts in it would not
  // run here, by the page's policy.
  function put(text) {
    var fresh = new DOMParser().parseFromString('<main>' + text + '</main>', 'text/html').querySelector('main');
    var open = Array.prototype.map.call(report.querySelectorAll('details'), function (d) { return d.open; });
    var scrolled = Array.prototype.map.call(report.querySelectorAll('.scroll'), function (d) { return d.scrollLeft; });
    report.replaceChildren.apply(report, Array.prototype.slice.call(fresh.childNodes));
    report.querySelectorAll('details').forEach(function (d, i) { d.open = Boolean(open[i]); });
    report.querySelectorAll('.scroll').forEach(function (d, i) { d.scrollLeft = scrolled[i] || 0; });
    window.dispatchEvent(new Event('harness-content'));
  }
  function readReport() {
    return fetch(base + '/content', tag ? { headers: { 'If-None-Match': tag } } : {}).then(function (r) {
      if (r.status === 304) return POLL_MS;
      if (r.status === 202) {
        return r.json().then(function (body) {
          if (body.problem) report.querySelector('.note').textContent = body.problem;
          return FIRST_MS;
        });
      }
      if (!r.ok) throw new Error(r.status);
      tag = r.headers.get('ETag');
      return r.text().then(function (text) { put(text); return POLL_MS; });
    });
  }
  function readRow() {
    return fetch('/api/runs', rowsTag ? { headers: { 'If-None-Match': rowsTag } } : {}).then(function (r) {
      if (r.status === 304) return;
      if (!r.ok) throw new Error(r.status);
      rowsTag = r.headers.get('ETag');
      return r.json().then(function (body) {
        var row = body.runs.filter(function (one) { return one.id === id; })[0];
        if (!row) return;
        live.textContent = words(row);
        commands(row);
      });
    });
  }
  function words(row) {
    var said = [row.state, row.step == null ? '' : 'step ' + row.step.toLocaleString('en') + (row.total ? ' of ' + row.total.toLocaleString('en') : '')];
    if (row.left) said.push(row.left + ' left');
    if (row.usd_per_h) said.push('$' + row.usd_per_h.toFixed(2) + ' per hour' + (row.simulated ? ', simulated' : ''));
    if (row.decision) said.push('decided ' + row.decision.what + (row.decision.reason ? ': ' + row.decision.reason : ''));
    (row.firing || []).forEach(function (a) { said.push(a.severity + ': ' + a.title); });
    return said.filter(Boolean).join('  ·  ');
  }
  // the server only reads: what acts on the run is a command to copy
  function commands(row) {
    var names = row.over ? ['logs', 'runs report'] : ['logs', 'stop', 'status'];
    var text = names.map(function (n) { return 'harness ' + n + ' ' + row.url; });
    var place = document.getElementById('commands');
    if (place.textContent === text.join('')) return;
    place.replaceChildren.apply(place, text.map(function (t) { var code = document.createElement('code'); code.textContent = t; return code; }));
  }
  // what nodes print is text of others: it is only ever set as text
  var logs = document.getElementById('logs'), logsTag = null;
  function element(name, text) { var e = document.createElement(name); e.textContent = text; return e; }
  function readLogs() {
    if (!logs.open) return Promise.resolve(FIRST_MS);
    return fetch(base + '/logs', logsTag ? { headers: { 'If-None-Match': logsTag } } : {}).then(function (r) {
      if (r.status === 304) return POLL_MS;
      if (!r.ok) throw new Error(r.status);
      if (r.status === 202) { logs.lastElementChild.replaceChildren(element('p', 'reading the logs …')); return FIRST_MS; }
      logsTag = r.headers.get('ETag');
      return r.json().then(function (body) { putLogs(body); return POLL_MS; });
    });
  }
  function putLogs(body) {
    var place = logs.lastElementChild, bottom = {};
    // who has scrolled up in a log stays there
    place.querySelectorAll('pre').forEach(function (p) { bottom[p.id] = p.scrollTop + p.clientHeight >= p.scrollHeight - 4 ? -1 : p.scrollTop; });
    var parts = [];
    if (body.problem) parts.push(element('p', body.problem));
    body.nodes.forEach(function (node) {
      var pre = element('pre', node.lines.join('\n'));
      pre.id = 'log-' + node.attempt;
      parts.push(element('h3', 'node ' + node.attempt), pre);
    });
    if (!body.nodes.length && !body.problem) parts.push(element('p', 'there is no log here: nodes that this computer has not launched keep theirs'));
    if (body.left_out) parts.push(element('p', body.left_out + ' older ' + (body.left_out > 1 ? 'nodes are' : 'node is') + ' left out: harness logs shows all'));
    place.replaceChildren.apply(place, parts);
    place.querySelectorAll('pre').forEach(function (p) { var was = bottom[p.id]; p.scrollTop = was === undefined || was < 0 ? p.scrollHeight : was; });
  }
  function again(f, ms) {
    function once() {
      if (document.hidden) { setTimeout(once, ms); return; }
      f().catch(function (e) { live.textContent = 'the server does not answer (' + e.message + ')'; })
        .then(function (next) { setTimeout(once, next || ms); });
    }
    once();
  }
  again(readReport, POLL_MS);
  again(readRow, POLL_MS);
  again(readLogs, POLL_MS);
})();
