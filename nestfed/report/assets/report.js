// Draws the charts of a report with uPlot, from the numbers in the page. Without this script the page shows pictures.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const AXES = { round: "rounds", examples: "examples", bytes: "bytes sent", seconds: "seconds" };
  const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((m) => m * 10 ** k));
  const DASHES = [[], [6, 4], [2, 3]];

  // Format numbers with just enough digits; large ones as 20k or 3M.
  const digits = (v, n) => String(Number(v.toPrecision(n)));
  const short = (v, n = 4) => {
    for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (Math.abs(v) >= size) return digits(v / size, n) + unit;
    return digits(v, n);
  };
  const value = (v) => (Math.abs(v) >= 1e4 ? short(v) : Math.abs(v) < 1e-3 ? (v ? v.toExponential(2) : "0") : Math.abs(v) < 10 ? v.toFixed(4) : digits(v, 5));
  const places = {
    round: (v) => `round ${Math.round(v)}`,
    examples: (v) => `${Math.round(v).toLocaleString("en")} examples`,
    bytes: (v) => `${short(v)}B sent`.replace(/([kMGT]?)B/, " $1B"),
    seconds: (v) => `${digits(v, 3)} s`,
  };

  // uPlot merges values of equal x on a common axis, so shift them by an invisible amount.
  const apart = (xs) => {
    const step = 1e-9 * (Math.abs(xs[xs.length - 1] - xs[0]) || 1);
    let last = -Infinity;
    return xs.map((x) => (last = x > last ? x : last + step));
  };

  // One chart's columns: for each series the mean, then the edges of its band, then its seeds.
  function columns(chart, state) {
    const tables = [], series = [{}], bands = [];
    for (const s of chart.series) {
      const stroke = colour(s.style === "dashed" ? "--soft" : `--c${s.slot % 7}`);
      const dash = s.style === "dashed" ? DASHES[1] : DASHES[Math.floor(s.slot / 7) % 3];
      const show = !state.hidden.has(s.slot);
      const base = { slot: s.slot, show, spanGaps: true, points: { show: false } };
      if (chart.kind === "figure") {
        tables.push([apart(s.x), s.y]);
        series.push(s.style === "points"
          ? { ...base, main: s, stroke, paths: () => null, points: { show: true, size: 8, fill: stroke, width: 0 } }
          : { ...base, main: s, stroke, width: 2, dash });
        continue;
      }
      const x = apart(s.at[state.axis]);
      tables.push([x, s.mean]);
      const single = s.mean.filter((v) => v !== null).length === 1;  // no line, so a dot
      series.push({ ...base, main: s, stroke, width: 2, dash, points: { show: single, size: 8, fill: stroke } });
      if (s.sd.length) {
        const floor = chart.log ? chart.view[0] : -Infinity;
        const edge = (sign) => s.mean.map((m, i) => (m === null || s.sd[i] === null ? null : Math.max(floor, m + sign * s.sd[i])));
        tables.push([x, edge(1)], [x, edge(-1)]);
        const at = series.length;
        series.push({ ...base, stroke: "transparent", width: 0 }, { ...base, stroke: "transparent", width: 0 });
        bands.push({ series: [at, at + 1], fill: stroke + "24" });
      }
      if (state.seeds) for (const seed of s.seeds) {
        tables.push([x, seed]);
        series.push({ ...base, stroke: stroke + "80", width: 1 });
      }
    }
    return { data: uPlot.join(tables, tables.map(() => [0, 0])), series, bands };
  }

  function tooltip(chart, state, tip) {
    return (u) => {
      const { left, top, idxs } = u.cursor;
      const rows = [];
      let at = null;
      u.series.forEach((s, i) => {
        if (!s.main || !s.show || !idxs || idxs[i] == null) return;
        const v = u.data[i][idxs[i]];
        if (v == null) return;
        const x = u.data[0][idxs[i]];
        // The nearest point of another method may be far away: show the x of each row if they differ.
        const edge = chart.kind === "curve" && s.main.sd.length ? u.data[i + 1][idxs[i]] : null;
        const sd = edge != null ? ` ± ${value(edge - v)}` : "";
        rows.push({ slot: s.main.slot, style: s.main.style, name: s.main.name, v, text: value(v) + sd, x });
        if (at === null || Math.abs(u.valToPos(x, "x") - left) < Math.abs(u.valToPos(at, "x") - left)) at = x;
      });
      tip.hidden = left < 0 || !rows.length;
      if (tip.hidden) return;
      const place = chart.kind === "curve" ? places[state.axis] : (x) => `${chart.x} ${digits(x, 3)}`;
      const near = rows.every((r) => Math.abs(r.x - at) <= 1e-6 * Math.abs(at) + 1e-12);
      rows.sort((a, b) => b.v - a.v);
      const head = document.createElement("b");
      head.textContent = near ? place(at) : "nearest points";
      const table = document.createElement("table");
      for (const r of rows) {
        const row = table.insertRow();
        const key = document.querySelector(`#${state.board} [data-slot="${r.slot}"] svg`);
        row.insertCell().append(key.cloneNode(true));
        row.insertCell().textContent = r.name;
        row.insertCell().textContent = r.text;
        if (!near) row.insertCell().textContent = place(r.x);
      }
      tip.replaceChildren(head, table);
      const plot = u.root.parentElement, box = u.over;
      const x = box.offsetLeft + left, wide = tip.offsetWidth, room = plot.clientWidth;
      tip.style.left = `${Math.max(0, x + 14 + wide <= room ? x + 14 : Math.max(0, Math.min(x - 14 - wide, room - wide)))}px`;
      tip.style.top = `${Math.max(0, Math.min(box.offsetTop + top + 12, plot.clientHeight - tip.offsetHeight))}px`;
    };
  }

  function make(chart, state) {
    const plot = document.querySelector(`#${chart.id} .plot`);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    plot.replaceChildren();
    const { data, series, bands } = columns(chart, state);
    const width = plot.clientWidth;
    const height = chart.unit ? Math.min(width, 460) : chart.small ? 240 : Math.max(260, Math.min(360, width * 0.6));
    const ink = colour("--soft"), line = colour("--line");
    const look = { stroke: ink, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const numbers = (u, splits) => {
      const step = splits.length > 1 ? Math.abs(splits[1] - splits[0]) : 1;
      const top = Math.max(...splits.map(Math.abs));
      if (top >= 1e4) return splits.map((v) => (v ? short(v, Math.max(4, Math.ceil(Math.log10(top / step)) + 1)) : "0"));
      if (top && top < 1e-3) return splits.map((v) => (v ? v.toExponential(1) : "0"));
      const n = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
      const odd = Number(step.toFixed(n)) !== Number(step.toPrecision(3)) ? 1 : 0;
      return splits.map((v) => v.toFixed(n + odd));
    };
    // A logarithmic axis is labelled at whole decades only.
    const decades = (u, i, min, max) => {
      const found = [];
      for (let k = Math.ceil(Math.log10(min) - 1e-9); k <= Math.log10(max) + 1e-9; k++) found.push(Number(`1e${k}`));
      return found;
    };
    const powers = (u, splits) => splits.map((v) => (v >= 1e4 ? short(v) : v < 1e-3 ? v.toExponential(0) : String(v)));
    const log = chart.log ? { splits: decades, values: powers, filter: (u, splits) => splits } : {};
    const xs = data[0];
    const ends = chart.unit ? [0, 1] : [xs[0], xs[xs.length - 1]];
    const fixed = chart.kind === "curve" ? (state.whole ? null : chart.view) : chart.view;
    const options = {
      width, height, series, bands, padding: [10, 14, 0, 0], legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 7 }, hover: { skip: [null, undefined] } },
      scales: {
        x: { time: false, range: (u, min, max) => (min === xs[0] && max === xs[xs.length - 1] ? (ends[1] - ends[0] > 1e-6 * Math.abs(ends[1]) ? ends : [ends[0] - 0.5, ends[0] + 0.5]) : [min, max]) },
        y: { distr: chart.log ? 3 : 1, range: fixed ? () => fixed : (u, min, max) => (min === null ? [0, 1] : chart.log ? uPlot.rangeLog(min, max, 10, true) : uPlot.rangeNum(min, max, 0.08, true)) },
      },
      axes: [
        { ...look, label: chart.kind === "curve" ? AXES[state.axis] : chart.x, labelSize: 20, size: 30, values: numbers, space: 60, ...(state.axis === "round" && chart.kind === "curve" ? { incrs: WHOLE } : {}) },
        { ...look, label: chart.kind === "figure" ? chart.y : undefined, labelSize: 20, size: 52, values: numbers, ...log },
      ],
      hooks: { setCursor: [tooltip(chart, state, tip)] },
    };
    const u = new uPlot(options, data, plot);
    series.forEach((s, i) => i && Object.assign(u.series[i], { main: s.main, slot: s.slot }));
    // Hovering marks means only: the edges of a band need no dots.
    u.root.querySelectorAll(".u-cursor-pt").forEach((dot, i) => { if (!u.series[i + 1].main) dot.style.display = "none"; });
    plot.append(tip);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${chart.metric || chart.y}: arrow keys move along the curves`);
    let step = -1;
    plot.onkeydown = (event) => {
      const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") return u.setCursor({ left: -10, top: -10 });
      if (!(event.key in moves)) return;
      event.preventDefault();
      step = Math.max(0, Math.min(u.data[0].length - 1, step + moves[event.key]));
      u.setCursor({ left: u.valToPos(u.data[0][step], "x"), top: u.over.clientHeight / 3 });
    };
    plot.onblur = () => u.setCursor({ left: -10, top: -10 });
    return u;
  }

  // A board is a set of charts with one legend.
  for (const board of document.querySelectorAll(".board")) {
    const own = charts.filter((chart) => board.querySelector(`[id="${chart.id}"]`));
    const state = { board: board.id, axis: Object.keys((own[0] && own[0].series[0] && own[0].series[0].at) || { round: 0 })[0], hidden: new Set(), seeds: false, whole: false };
    let plots = [];
    const redraw = () => {
      plots.forEach((u) => u.destroy());
      plots = own.filter((chart) => chart.series.length).map((chart) => make(chart, state));
    };
    board.addEventListener("change", (event) => {
      const { type, value, checked } = event.target;
      if (type === "radio") state.axis = value;
      else state[value] = checked;
      redraw();
    });
    for (const key of board.querySelectorAll(".legend button")) {
      key.addEventListener("click", () => {
        const slot = Number(key.dataset.slot), hide = !state.hidden.has(slot);
        if (hide) state.hidden.add(slot); else state.hidden.delete(slot);
        key.setAttribute("aria-pressed", String(!hide));
        for (const u of plots) u.batch(() => u.series.forEach((s, i) => { if (i && s.slot === slot) u.setSeries(i, { show: !hide }); }));
      });
    }
    root.classList.add("js");
    redraw();
    let width = board.clientWidth;
    new ResizeObserver(() => {
      if (board.clientWidth !== width && board.clientWidth) {
        width = board.clientWidth;
        redraw();
      }
    }).observe(board);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    board.plots = () => plots;
  }

  addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach((d) => { d.open = true; d.dataset.opened = ""; }));
  addEventListener("afterprint", () => document.querySelectorAll("[data-opened]").forEach((d) => { d.open = false; delete d.dataset.opened; }));
})();
