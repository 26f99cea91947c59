"use strict";
// Draws the data of each chart with uPlot. Words, tables, marks and timeline are complete without it.
(() => {
  const HEIGHT = 252, AXIS = 64, RIGHT = 14, TOP = 18; // the style sheet has AXIS and RIGHT as well
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';
  const MIB = 2 ** 20, GIB = 2 ** 30, DAY = 86400;
  const box = document.getElementById("readout");
  const styles = getComputedStyle(document.documentElement);
  const colour = (name) => styles.getPropertyValue("--" + name).trim();
  const figures = (value) => Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(2).replace(/\.?0*e\+?/, "e")
    : Number(value.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
  const clock = (seconds) => {
    if (seconds < 120) return seconds.toFixed(seconds < 10 ? 2 : 1) + " s";
    const parts = [seconds / 3600, seconds / 60 % 60, seconds % 60].map(Math.floor);
    return parts.map((part, index) => index ? String(part).padStart(2, "0") : part).join(":");
  };

  // for each unit: a read-out, the label of a tick, and the distances that ticks may have
  const UNITS = {
    bytes: {
      text: (value) => value < GIB ? (value / MIB).toFixed(1) + " MiB" : (value / GIB).toFixed(2) + " GiB",
      tick: (value) => value < GIB ? figures(value / MIB) + " MiB" : figures(value / GIB) + " GiB",
      steps: Array.from({length: 36}, (_, power) => 2 ** (10 + power)),
    },
    time: {
      text: clock,
      tick: (value, step) => { // in the largest unit that makes no fractions
        const [size, name] = [[DAY, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => step % size === 0 || size === 1);
        return figures(value / size) + " " + name;
      },
      steps: [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
        3600, 7200, 10800, 21600, 43200, ...[1, 2, 5, 10, 20, 50, 100].map((days) => days * DAY)],
    },
    step: {
      text: (value) => "step " + Math.round(value).toLocaleString("en"),
      tick: (value) => value.toLocaleString("en"),
      steps: Array.from({length: 30}, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3)),
    },
    number: {text: figures, tick: figures},
    figure: {text: figures, tick: figures},
  };

  function axis(unit, ticks) {
    const own = {
      stroke: () => colour("quiet"),
      font: FONT,
      grid: {stroke: () => colour("grid"), width: 1},
      ticks: {show: ticks, stroke: () => colour("quiet"), size: 4, width: 1},
      values: (u, values) => {
        const known = values.filter((value) => value != null);
        const step = known[1] - known[0];
        return values.map((value) => value == null ? null : value === 0 ? "0" : unit.tick(value, step));
      },
    };
    return unit.steps ? {...own, incrs: unit.steps} : own;
  }

  // memory starts at zero, unless a part of the time is looked at in which it changes little
  function bytesRange(u, low, high) {
    const [first, last] = u.series[0].idxs || [0, Infinity];
    const isZoomed = first > 0 || last < u.data[0].length - 1;
    const room = Math.max(0.15 * (high - low), MIB);
    return isZoomed && low > high / 2 ? [low - room, high + room] : [0, 1.1 * high || MIB];
  }

  function numberRange(u, low, high) {
    const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
    return [low < 0 ? low - room : Math.max(low - room, 0), high + room];
  }

  function drawBands(u, bands) {
    const {ctx, bbox} = u, ratio = devicePixelRatio;
    let free = -Infinity;
    ctx.save();
    ctx.font = 11 * ratio + "px sans-serif";
    bands.forEach((band, index) => {
      const left = Math.max(u.valToPos(band.start, "x", true), bbox.left);
      const right = Math.min(u.valToPos(band.end, "x", true), bbox.left + bbox.width);
      if (right < left) return;
      ctx.fillStyle = colour("ink");
      ctx.globalAlpha = index % 2 ? 0.065 : 0.025;
      ctx.fillRect(left, bbox.top, Math.max(right - left, 1), bbox.height);
      const end = left + ctx.measureText(band.label).width + 10 * ratio;
      if (left < free || end > bbox.left + bbox.width) return;
      ctx.fillStyle = colour("quiet");
      ctx.globalAlpha = 1;
      ctx.fillText(band.label, left + 3 * ratio, bbox.top - 5 * ratio);
      free = end;
    });
    ctx.restore();
  }

  function showReadout(u, plot) {
    const {left, top, idxs} = u.cursor;
    const values = plot.lines.map((line, index) => [line.name, idxs && u.data[index + 1][idxs[index + 1]]]);
    const known = values.filter(([, value]) => value != null);
    box.hidden = !(left >= 0 && known.length);
    if (box.hidden) return;
    const at = UNITS[plot.x].text(u.posToVal(left, "x"));
    box.textContent = at + known.map(([name, value]) => `\n${name}: ${UNITS[plot.y].text(value)}`).join("");
    const frame = u.over.getBoundingClientRect();
    const widest = document.documentElement.clientWidth - box.offsetWidth - 6;
    box.style.left = Math.max(Math.min(frame.left + left + 14, widest), 4) + scrollX + "px";
    box.style.top = frame.top + top + 16 + scrollY + "px";
  }

  function draw(figure) {
    const plot = JSON.parse(figure.querySelector("script").textContent);
    plot.y = plot.x === "time" ? "bytes" : "number";
    const isDots = plot.x === "figure";
    const place = figure.querySelector(".plot");
    const marks = [...figure.querySelectorAll(".mark")].map((mark) => [mark, parseFloat(mark.style.left) / 100]);
    const lines = plot.lines.map((line) => ({
      label: line.name,
      stroke: () => colour(line.style) + (line.is_lost ? "90" : ""),
      fill: line.is_area ? () => colour(line.style) + "21" : undefined,
      dash: line.is_lost ? [4, 4] : undefined,
      width: 1.5,
      paths: isDots ? () => null : undefined,
      // samples are many: a dot only where there is no line
      points: isDots ? {show: true, size: 8, fill: () => colour(line.style) + (line.is_lost ? "60" : "")} : plot.x === "step" || line.x.length < 2 ? {size: 4, fill: () => colour(line.style)} : {show: false},
    }));
    // the first table has no lines: it spans the axis
    const tables = [[[plot.low, plot.high]], ...plot.lines.map((line) => [line.x, line.y])];
    if (plot.level != null) {
      lines.push({stroke: () => colour("lost"), dash: [6, 4], points: {show: false}});
      tables.push([[0, plot.high], [plot.level, plot.level]]);
    }
    const isBytes = plot.y === "bytes";
    const u = new uPlot({
      width: place.clientWidth,
      height: HEIGHT,
      padding: [TOP, RIGHT, 0, 0],
      legend: {show: false},
      cursor: {y: false, hover: {prox: 30}, points: {size: 6}, drag: {x: true, y: false, dist: 4}},
      scales: {
        x: {time: false, distr: plot.is_log_x ? 3 : 1},
        y: plot.is_log ? {distr: 3} : {range: isBytes ? bytesRange : numberRange},
      },
      axes: [{...axis(UNITS[plot.x], true), size: 34, grid: {show: false}, border: {show: true, stroke: () => colour("quiet"), width: 1}}, {...axis(UNITS[plot.y], false), size: AXIS}],
      series: [{}, ...lines],
      hooks: {
        drawClear: [(u) => drawBands(u, plot.bands)],
        setCursor: [(u) => showReadout(u, plot)],
        setScale: [(u, key) => {
          if (key !== "x") return;
          const {min, max} = u.scales.x;
          for (const [mark, share] of marks) {
            const at = (share * plot.high - min) / (max - min);
            mark.hidden = at < 0 || at > 1;
            mark.style.left = 100 * at + "%";
          }
        }],
      },
    }, uPlot.join(tables), place);
    return fitted(u, place);
  }

  function drawAxis(place) {
    const side = -parseFloat(getComputedStyle(place).marginRight); // room for half a label
    const u = new uPlot({
      width: place.clientWidth,
      height: place.clientHeight,
      padding: [0, side, 0, side],
      legend: {show: false},
      cursor: {show: false},
      scales: {x: {time: false}},
      axes: [{...axis(UNITS.time, true), size: place.clientHeight, grid: {show: false}}],
      series: [{}],
    }, [[0, Number(place.dataset.high)]], place);
    return fitted(u, place);
  }

  function fitted(u, place) {
    new ResizeObserver(() => place.clientWidth && u.setSize({width: place.clientWidth, height: u.height})).observe(place);
    return u;
  }

  const all = [...document.querySelectorAll("figure.chart")].map(draw);
  const axes = [...document.querySelectorAll(".axis")].map(drawAxis);
  const hint = Object.assign(document.createElement("p"), {className: "quiet hint", textContent: "Drag over a chart to zoom in, double-click to see all of it again."});
  if (all.length) document.querySelector("figure.chart").after(hint);
  const redraw = () => [...all, ...axes].forEach((u) => u.redraw(false, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // paper is white: a picture drawn for a dark screen would be pale on it
  for (const [event, isPaper] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { document.documentElement.classList.toggle("paper", isPaper); redraw(); });
  }
})();
