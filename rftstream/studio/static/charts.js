// Curves to point at, wherever a page has figures with panels: from an address (the studio), or from a block of JSON in
// the page itself (`plot`). Without scripts the pictures that the page came with stay.
"use strict";
const charts = (() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dashes = { dash: [6, 4], dot: [2, 3], dashdot: [7, 3, 2, 3], longdash: [11, 4], longdashdot: [11, 3, 2, 3] };
  const WHOLE = [...Array(13).keys()].flatMap((power) => [1, 2, 2.5, 5].map((digit) => digit * 10 ** power)).filter(Number.isInteger); // between ticks of versions
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
    return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(size >= 100 ? 0 : 3);
  };
  const tick = (value) => { // of an axis: as many digits as it has, not three
    if (value === null || value === undefined) return "";
    const exact = Number(value.toPrecision(10)), size = Math.abs(exact);
    if (size !== 0 && (size < 0.001 || size >= 1e7)) return exact.toExponential().replace("e+", "e");
    return size >= 1e4 ? exact.toLocaleString("en") : String(exact);
  };
  const decades = (_, splits) => splits.map((value) => (value > 0 && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9 ? value : null));
  const drawn = new Map(); // figure -> its plot, and what it shows
  const sizeOf = (figure) => ({
    width: Math.max(120, figure.clientWidth - 28),
    height: figure.closest(".full") ? Math.max(320, innerHeight - 330) : figure.closest(".large") ? 300 : 235,
  });

  function tableOf(panel) {
    const tables = [], series = [{}], bands = [];
    for (const [place, line] of panel.lines.entries()) {
      const stroke = color("--c" + line.color), scale = line.right ? "right" : line.limits ? "own" + place : "y";
      const style = { scale, stroke, dash: dashes[line.dash], spanGaps: panel.log, gaps: gapsOf(panel, place) };
      if (line.mean) {
        tables.push([line.x, line.y]);
        series.push({ ...style, label: "", width: 1, alpha: 0.28, points: { show: false } });
      }
      tables.push([line.x, line.mean || line.y]);
      series.push({ ...style, label: line.label, width: line.area ? 1 : 1.8, points: { show: line.x.length <= 40 && !line.area, size: 5 } });
      if (line.area) {
        const below = series.at(-2).area ? series.length - 2 : 0, fill = stroke + "66";
        Object.assign(series.at(-1), { area: true, below }, below ? {} : { fill });
        if (below) bands.push({ series: [series.length - 1, below], fill });
      }
    }
    return { data: tables.length ? uPlot.join(tables) : null, series, bands };
  }

  function gapsOf(panel, place) { // where another reward scores; what the table of all lines left empty is no gap
    return (plot) => panel.lines[place].gaps.map((ends) => ends.map((x, end) => Math.round(plot.valToPos(x, "x", true)) + (end ? 1 : -1)));
  }

  function widthOf(plot, values, place, cycle) { // of the figures of an axis, which its label stands beside
    const axis = plot.axes[place];
    if (cycle > 1) return axis._size;
    plot.ctx.font = axis.font[0];
    return Math.ceil(9 + Math.max(18, ...(values || []).map((text) => plot.ctx.measureText(text ?? "").width / devicePixelRatio)));
  }

  function axisOf(more) {
    const { log, grid, ...rest } = more, filter = log ? { filter: decades } : {};
    return {
      stroke: color("--faint"), ticks: { show: false }, font: "12px system-ui", labelFont: "11px system-ui", labelSize: 16, labelGap: 0, size: widthOf,
      values: (_, splits) => splits.map(tick), grid: { stroke: color("--rule"), width: 1, ...filter, ...grid }, ...filter, ...rest,
    };
  }

  const ends = (plot) => [plot.data[0][0], plot.data[0].at(-1)];
  const isZoomed = (plot) => plot.scales.x.min > ends(plot)[0] || plot.scales.x.max < ends(plot)[1];

  function zoom(plot, factor) { // 0: back to all of it; else around the cursor
    const [low, high] = ends(plot), { min, max } = plot.scales.x, half = ((max - min) * factor) / 2;
    const middle = plot.cursor.idx !== null && plot.cursor.idx !== undefined ? plot.data[0][plot.cursor.idx] : (min + max) / 2;
    for (const { plot: one } of drawn.values()) { // all of a page, as a drag does
      const [first, last] = ends(one);
      one.setScale("x", factor ? { min: Math.max(low, middle - half), max: Math.min(high, middle + half) } : { min: first, max: last });
    }
  }

  function save(panel, plot) { // the picture with its title and its lines' names, on paper of its own
    const from = plot.ctx.canvas, paper = document.createElement("canvas"), scale = devicePixelRatio || 1, edge = 14 * scale;
    const lines = panel.lines.filter((one) => one.label || panel.lines.length === 1);
    paper.width = from.width + 2 * edge;
    paper.height = from.height + 2 * edge + (30 + 20 * lines.length) * scale;
    const pen = paper.getContext("2d");
    pen.fillStyle = color("--card");
    pen.fillRect(0, 0, paper.width, paper.height);
    pen.fillStyle = color("--ink");
    pen.font = `600 ${16 * scale}px system-ui`;
    pen.fillText(panel.title, edge, edge + 16 * scale);
    pen.drawImage(from, edge, edge + 26 * scale);
    pen.font = `${12 * scale}px system-ui`;
    for (const [place, line] of lines.entries()) {
      const y = edge + from.height + (46 + 20 * place) * scale;
      pen.fillStyle = color("--c" + line.color);
      pen.fillRect(edge, y - 6 * scale, 16 * scale, 3 * scale);
      pen.fillStyle = color("--ink");
      pen.fillText(`${line.label || panel.title} ${line.last}${line.suffix}${line.range ? ` (${line.range})` : ""}`, edge + 22 * scale, y);
    }
    paper.toBlob((blob) => {
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${panel.title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  function draw(figure, panel) {
    const { data, series, bands } = tableOf(panel);
    if (!data) return;
    const legend = figure.querySelector(".legend"), holder = document.createElement("div");
    const names = series.slice(1).map((one, place) => [one.label, place + 1]).filter(([label]) => label);
    const sharing = (place) => (series[place - 1].label === "" ? [place - 1, place] : [place]); // a mean and its values
    const say = (plot) => {
      const at = plot.cursor.idx;
      legend.replaceChildren(...names.map(([label, place]) => {
        const item = document.createElement("li"), button = document.createElement("button"), key = document.createElement("i");
        const line = panel.lines.find((one) => one.label === label), { below, show } = plot.series[place];
        const values = below ? plot.data[place].map((edge, i) => edge - plot.data[below][i]) : plot.data[place];
        const value = at === null || at === undefined ? values.findLast((one) => one !== null && one !== undefined) : values[at];
        key.className = "c" + line.color;
        button.append(key, `${label} ${short(value)}${line.suffix}${line.range ? ` (${line.range})` : ""}`);
        button.type = "button";
        button.setAttribute("aria-pressed", String(show));
        button.title = "hides the line, or shows it";
        button.dataset.place = place;
        button.addEventListener("click", () => {
          for (const i of sharing(place)) plot.setSeries(i, { show: !show });
          say(plot);
          legend.querySelector(`[data-place="${place}"]`).focus();
        });
        item.append(button);
        return item;
      }).concat(said(plot, at).map((textContent) => Object.assign(document.createElement("li"), { textContent }))));
    };
    const said = (plot, at) => { // of the position pointed at, and what has changed since the one before
      if (at === null || at === undefined) return [];
      const x = plot.data[0][at], before = at ? plot.data[0][at - 1] : -Infinity, isLast = at === plot.data[0].length - 1;
      const changes = panel.changes.filter((one) => one.x >= before && (one.x <= x || isLast));
      return [`${panel.xLabel.split(" ")[0]} ${short(x)}`, ...changes.map((one) => one.text)];
    };
    const tools = figure.querySelector(".tools"), tool = (name, does) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: name });
      button.setAttribute("aria-label", `${panel.title}: ${name}`);
      button.addEventListener("click", does);
      tools.prepend(button);
      return button;
    };
    for (const button of tools.querySelectorAll("button")) button.remove();
    tool("PNG", () => save(panel, plot));
    const back = tool("zoom back", () => zoom(plot, 0));
    back.hidden = true;
    const marks = (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = color("--faint");
      ctx.setLineDash([2, 4]);
      for (const mark of panel.marks) {
        const x = Math.round(plot.valToPos(mark, "x", true));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      }
      const scale = devicePixelRatio, end = bbox.left + bbox.width;
      Object.assign(ctx, { fillStyle: color("--faint"), font: `${11 * scale}px system-ui`, textAlign: "left", textBaseline: "bottom", lineWidth: scale });
      ctx.setLineDash([]);
      let free = 0; // words stand above the curves, where those before leave room
      for (const [place, { x: at, text: whole }] of panel.changes.entries()) {
        const x = Math.round(plot.valToPos(at, "x", true)), next = panel.changes[place + 1];
        const room = next ? plot.valToPos(next.x, "x", true) - x - 6 * scale : end - Math.max(free, bbox.left); // the last may stand left of its line
        let text = whole;
        while (text.length > 6 && ctx.measureText(text).width > room) text = text.slice(0, -2).trimEnd() + "…";
        const wide = ctx.measureText(text).width, begins = Math.min(x, end - wide);
        if (x < bbox.left || x > end) continue;
        ctx.beginPath(); ctx.moveTo(x, bbox.top - 3 * scale); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
        if (begins < free) continue;
        ctx.fillText(text, begins, bbox.top - 4 * scale);
        free = begins + wide + 6 * scale;
      }
      ctx.restore();
    };
    const fit = (range) => (_, low, high) => {
      if (low === null || high === null) return [0, 1];
      if (range()) [low, high] = range();
      if (panel.fromZero && low === 0 && high === 0) return [0, 1];
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [panel.fromZero ? Math.min(0, low) : low - room, high + room];
    };
    const wide = () => [panel.range[0] / 1.3, panel.range[1] * 1.3];
    const hasRight = series.some((one) => one.scale === "right");
    const own = Object.fromEntries(panel.lines.flatMap((line, place) => (line.limits ? [["own" + place, { range: () => panel.lines[place].limits }]] : [])));
    const plot = new uPlot({
      ...sizeOf(figure), series, bands, legend: { show: false }, padding: [() => (panel.changes.length ? 20 : 6), hasRight ? 0 : 18, 0, 0],
      scales: { x: { time: false, range: (one, low, high) => (one.data[0].length === 1 ? [one.data[0][0], one.data[0][0] + 1] : [low, high]) }, y: panel.log ? { distr: 3, range: wide } : { range: fit(() => panel.range) }, right: { range: fit(() => null) }, ...own },
      axes: [
        axisOf({ size: 26, label: panel.xLabel, ...(panel.xLabel.startsWith("version") ? { incrs: WHOLE } : {}) }), axisOf({ scale: "y", label: panel.unit.length * 6 < sizeOf(figure).height ? panel.unit : "", log: panel.log, ...(Object.keys(own).length ? { size: 8, values: () => [], grid: { show: false } } : {}) }),
        ...(hasRight ? [axisOf({ scale: "right", side: 1, label: panel.rightUnit, grid: { show: false } })] : []),
      ],
      cursor: { sync: { key: "curves" }, y: false, points: { size: 6 } },
      hooks: { setCursor: [say], draw: [marks], setScale: [(_, key) => { if (key === "x") back.hidden = !isZoomed(plot); }] },
    }, data, holder);
    for (const part of figure.querySelectorAll(":scope > .plot, :scope > .axis, :scope > .drawn")) part.remove();
    holder.className = "drawn";
    holder.setAttribute("role", "img");
    holder.tabIndex = 0;
    holder.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], factor = { "+": 0.5, "-": 2, Escape: 0 }[event.key];
      if (event.ctrlKey || event.metaKey || event.altKey || (step === undefined && factor === undefined)) return;
      event.preventDefault();
      if (factor !== undefined) return zoom(plot, factor);
      const last = plot.data[0].length - 1, at = Math.min(last, Math.max(0, (plot.cursor.idx ?? (step > 0 ? -1 : last + 1)) + step));
      plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 0 });
    });
    holder.setAttribute("aria-label", `${panel.title}: ` + panel.lines.map((one) => `${one.label} ${short(one.y.at(-1))}`).join("; "));
    figure.querySelector("figcaption").after(holder);
    if (figure.dataset.versions) {
      let began = null;
      plot.over.title = "click opens the version";
      plot.over.addEventListener("mousedown", (event) => { began = event.clientX; });
      plot.over.addEventListener("mouseup", (event) => {
        if (began !== null && Math.abs(event.clientX - began) < 3 && plot.cursor.idx !== null) {
          const version = Math.round(plot.data[0][plot.cursor.idx]), base = new URL(figure.dataset.versions, location.href);
          if (version > 0) location.href = `${base.pathname}/${version}${base.search}`;
        }
        began = null;
      });
    }
    say(plot);
    drawn.set(figure, { plot, panel });
  }

  async function panelsOf(source) {
    if (source.startsWith("#")) return JSON.parse(document.querySelector(source).textContent);
    const answer = await fetch(source, { headers: { accept: "application/json" } });
    return answer.ok ? answer.json() : [];
  }

  async function drawAll() {
    const bySource = new Map();
    for (const figure of document.querySelectorAll("figure.chart[data-chart]")) {
      const source = figure.dataset.chart;
      if (source && figure.clientWidth && figure.querySelector(".legend")) bySource.set(source, [...(bySource.get(source) || []), figure]);
    }
    for (const figure of [...drawn.keys()]) if (!figure.isConnected) { drawn.get(figure).plot.destroy(); drawn.delete(figure); }
    for (const [source, figures] of bySource) {
      const panels = await panelsOf(source);
      for (const figure of figures) {
        const panel = panels.find((one) => one.title === figure.dataset.index);
        if (!panel) continue;
        const known = drawn.get(figure), { data, series } = tableOf(panel);
        if (known && data && series.length === known.plot.series.length) {
          known.panel.lines = panel.lines;
          known.panel.marks = panel.marks;
          known.panel.changes = panel.changes;
          known.panel.range = panel.range;
          const { min, max } = known.plot.scales.x, kept = isZoomed(known.plot);
          known.plot.setData(data);
          if (kept) known.plot.setScale("x", { min, max });
        } else {
          if (known) known.plot.destroy();
          draw(figure, panel);
        }
      }
    }
  }

  let waiting = null;
  function soon() { // of many changes at once, one drawing
    if (waiting === null) waiting = setTimeout(() => { waiting = null; drawAll().catch(() => {}); }, 1500);
  }

  addEventListener("DOMContentLoaded", () => drawAll().catch(() => {}));
  addEventListener("toggle", (event) => { if (event.target.matches(".theme[open]")) drawAll().catch(() => {}); }, true); // folded charts have no size
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { plot } of drawn.values()) plot.destroy();
    for (const [figure, { panel }] of [...drawn]) draw(figure, panel);
  });
  let resizing = null;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      for (const [figure, { plot }] of drawn) if (figure.clientWidth) plot.setSize(sizeOf(figure));
    }, 150);
  });
  return { soon };
})();
