"use strict";
// Read-outs under the pointer. The page is complete without them.
(() => {
  const box = document.getElementById("readout");
  const NS = "http://www.w3.org/2000/svg";

  function points(line) {
    // relative steps, as they are written
    const all = [];
    let x = 0, y = 0;
    for (const piece of line.getAttribute("d").split("M").slice(1)) {
      piece.split("l").forEach((pair, index) => {
        const [a, b] = pair.split(",").map(Number);
        x = index ? x + a : a;
        y = index ? y + b : b;
        all.push([x, y]);
      });
    }
    return all;
  }

  const round = (value) => Number(value.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
  function readable(value, unit) {
    if (unit === "bytes") return value >= 2 ** 30 ? (value / 2 ** 30).toFixed(2) + " GiB" : (value / 2 ** 20).toFixed(1) + " MiB";
    if (unit === "step") return "step " + Math.round(value).toLocaleString("en");
    if (unit === "time") {
      if (value < 120) return value.toFixed(value < 10 ? 2 : 1) + " s";
      const parts = [Math.floor(value / 3600), Math.floor(value / 60) % 60, Math.floor(value) % 60];
      return parts.map((part, index) => index ? String(part).padStart(2, "0") : part).join(":");
    }
    return round(value);
  }

  // a line's own units, and where the plot begins in the picture, in pixels
  const WIDTH = 1000, HEIGHT = 200, TOP = 18;
  for (const plot of document.querySelectorAll("svg[data-x]")) {
    const [x0, x1, xUnit] = plot.dataset.x.split(",");
    const [y0, y1, yUnit, log] = plot.dataset.y.split(",");
    const valueX = (px) => +x0 + px / WIDTH * (x1 - x0);
    const valueY = (py) => {
      const share = 1 - py / HEIGHT;
      return log ? y0 * Math.pow(y1 / y0, share) : +y0 + share * (y1 - y0);
    };
    let lines = null, cursor = null;
    const hide = () => { box.hidden = true; if (cursor) cursor.style.display = "none"; };
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("pointermove", (event) => {
      const frame = plot.getBoundingClientRect();
      const px = (event.clientX - frame.left) / frame.width * WIDTH;
      const py = event.clientY - frame.top - TOP;
      if (px < 0 || px > WIDTH || py < 0 || py > HEIGHT) return hide();
      lines ||= [...plot.querySelectorAll(".line")].map((line) => [line.dataset.name, points(line)]);
      const near = [];
      for (const [name, all] of lines) {
        let best = null;
        for (const point of all) if (!best || Math.abs(point[0] - px) < Math.abs(best[0] - px)) best = point;
        if (best && Math.abs(best[0] - px) < 12) near.push([name, best]);
      }
      if (!near.length) return hide();
      if (!cursor) {
        cursor = document.createElementNS(NS, "line");
        for (const [name, value] of [["class", "cursor"], ["y1", TOP], ["y2", TOP + HEIGHT]]) cursor.setAttribute(name, value);
        plot.append(cursor);
      }
      cursor.style.display = "";
      for (const name of ["x1", "x2"]) cursor.setAttribute(name, `${100 * px / WIDTH}%`);
      box.textContent = readable(valueX(px), xUnit) + near.map(([name, point]) => "\n" + name + ": " + readable(valueY(point[1]), yUnit)).join("");
      box.hidden = false;
      const wide = document.documentElement.clientWidth;
      const place = Math.min(event.clientX + 14, wide - box.offsetWidth - 6);
      box.style.left = Math.max(place, 4) + scrollX + "px";
      box.style.top = event.clientY + scrollY + 16 + "px";
    });
  }
})();
