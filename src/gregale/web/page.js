// Draws a page's charts with uPlot and follows its controls. All texts come as data and become text, never markup.
"use strict";
(() => {
  let page = null;
  const root = document.documentElement;
  const controls = document.getElementById("controls");
  const settings = { x: "", logx: false, logy: false, smooth: "losses", theme: "auto", filter: "", sort: "" };
  const zooms = new Map(), hidden = new Map(); // [min, max] by axis; by chart the labels of lines that are left out
  const drawn = new Map(); // uPlot by figure
  let printing = false;

  // ---- numbers for a reader

  const SI = ["", "k", "M", "G", "T", "P"];

  function short(value, digits = 4) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e-3 && size < 1e5) return value.toLocaleString("en", { maximumSignificantDigits: digits });
    return size >= 1e5 ? scaled(value, digits) : value.toExponential(Math.max(0, digits - 2));
  }

  function scaled(value, digits) {
    let place = 0;
    while (Math.abs(value) >= 999.5 && place < SI.length - 1) { value /= 1000; place += 1; }
    return `${Number(value.toPrecision(Math.max(digits, 3)))}${SI[place] ? " " + SI[place] : ""}`;
  }

  function duration(seconds, digits) { // the two largest parts, without one that is 0
    if (seconds < 0) return `-${duration(-seconds, digits)}`; // a clock that was put back
    if (seconds !== 0 && Math.abs(seconds) < 1e-3) return `${short(1e6 * seconds, digits)} µs`;
    if (seconds !== 0 && Math.abs(seconds) < 0.1) return `${short(1e3 * seconds, digits)} ms`;
    if (Math.abs(seconds) < 60) return `${short(seconds, digits)} s`;
    const whole = Math.round(seconds), units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = units.findIndex(([size]) => whole >= size);
    const [[large, name], [small, below]] = units.slice(first, first + 2);
    const rest = Math.floor((whole % large) / small);
    return `${Math.floor(whole / large)} ${name}${rest ? ` ${rest} ${below}` : ""}`;
  }

  function told(value, unit, digits) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (unit === "bytes") { const text = scaled(value, digits ?? 4); return /[kMGTP]$/.test(text) ? text + "B" : text + " B"; }
    if (unit === "seconds") return duration(value, digits ?? 4);
    if (unit === "share") return `${short(100 * value, digits ?? 4)} %`;
    return unit ? `${short(value, digits)} ${unit}` : short(value, digits);
  }

  // ---- data

  const summed = differences => { let sum = 0; return differences.map(each => (sum += each)); };
  const xOf = points => points.x || summed(points.dx);

  function between(xs, ys, x) { // linear; flat beyond both ends
    if (x <= xs[0]) return ys[0];
    let low = 0, high = xs.length - 1;
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
  }

  function read(from) {
    page = JSON.parse(from.getElementById("data").textContent);
    for (const run of page.runs) for (const axis of Object.values(run.axes)) axis.at = xOf(axis);
  }

  function placed(series, points) { // the points of a line over the axis that is chosen, null where it has none
    const steps = xOf(points);
    if (series.run === undefined || settings.x === "steps") return [steps, points.y];
    const axis = page.runs[series.run].axes[settings.x];
    if (!axis || !axis.at.length) return null;
    const xs = [], ys = [];
    steps.forEach((step, place) => { // of points at one place the last
      const x = between(axis.at, axis.y, step);
      if (xs.length && x <= xs[xs.length - 1]) { ys[xs.length - 1] = points.y[place]; } else { xs.push(x); ys.push(points.y[place]); }
    });
    return [xs, ys];
  }

  function smoothed([xs, ys], share) { // a mean with weights that fall by e over `share` of all x to each side
    const reach = share * (xs[xs.length - 1] - xs[0]), first = ys.findIndex(y => y !== null);
    if (!(reach > 0) || first < 0) return [xs, ys];
    const sums = xs.map(() => 0), weights = xs.map(() => 0), places = [...xs.keys()].slice(first);
    const pass = (order, sum, weight) => {
      let last = xs[order[0]];
      for (const place of order) {
        const kept = Math.exp(-Math.abs(xs[place] - last) / reach), known = ys[place] !== null;
        sum = sum * kept + (known ? ys[place] : 0); weight = weight * kept + (known ? 1 : 0); last = xs[place];
        sums[place] += sum; weights[place] += weight;
      }
    };
    pass(places.toReversed(), 0, 0);
    // Mirrored through its first point, the line goes on to the left: so the mean of a steep line begins at that point.
    const others = weights[first] - 1, y = ys[first];
    pass(places, 2 * y * others - (sums[first] - y), others);
    return [xs, ys.map((y, place) => (y === null ? null : (sums[place] - y) / (weights[place] - 1)))]; // y is in both sums
  }

  function positive([xs, ys], logx, logy) { // what a logarithm can show
    if (logy) ys = ys.map(y => (y !== null && y <= 0 ? null : y));
    if (!logx) return [xs, ys];
    const first = xs.findIndex(x => x > 0);
    return first < 0 ? [[], []] : [xs.slice(first), ys.slice(first)];
  }

  // ---- uPlot

  const colour = name => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  // Read, for what is multiplied (5 * 10 ** -6) has digits for which uPlot passes over it.
  const SECONDS = [...[-8, -7, -6, -5, -4, -3, -2, -1, 0].flatMap(power => [1, 2, 5].map(each => Number(`${each}e${power}`))),
    10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000];

  function axis(unit, more) {
    const ink = colour("faint"), line = colour("grid");
    return {
      stroke: ink, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, gap: 4,
      values: (u, splits, place, _, step) => {
        const largest = Math.max(...splits.map(Math.abs)), linear = u.scales[u.axes[place].scale].distr === 1;
        const digits = linear && step > 0 && largest > 0 ? Math.ceil(Math.log10(largest / step)) + 2 : 3;
        return splits.map(each => (each === null ? null : told(each, unit, Math.max(2, Math.min(12, digits)))));
      },
      ...(unit === "seconds" ? { incrs: SECONDS } : {}),
      ...more,
    };
  }

  const widthOf = ticks => 14 + 6.6 * Math.max(2, ...(ticks || []).map(text => String(text ?? "").length));
  const width = holder => Math.max(200, Math.floor(printing ? 480 : holder.clientWidth));

  // A gap lasts until the line's own next point, and not until that of any other line.
  const joined = tables => uPlot.join(tables, tables.map(table => table.map(() => 2)));

  function nearest(u, place, closest, x) { // of a line that has no point just there the point beside it, if it goes on
    const ys = u.data[place], xs = u.data[0];
    if (ys[closest] !== undefined && ys[closest] !== null) return closest;
    let before = closest, after = closest;
    while (before >= 0 && (ys[before] === undefined || ys[before] === null)) before -= 1;
    while (after < ys.length && (ys[after] === undefined || ys[after] === null)) after += 1;
    if (before < 0 || after >= ys.length) {
      const found = before < 0 ? after : before;
      const near = found >= 0 && found < xs.length && Math.abs(u.valToPos(xs[found], "x") - u.valToPos(x, "x")) < 12;
      return near ? found : closest;
    }
    return x - xs[before] <= xs[after] - x ? before : after;
  }

  const isNumber = y => y !== undefined && y !== null;

  function valueOf(u, place) { // of a line under the cursor; its last one without a cursor
    const at = u.cursor.idxs[place];
    return isNumber(at) ? u.data[place][at] : u.data[place].findLast(isNumber);
  }

  function shareOf(series) { // of the x axis, over which a line is smoothed; 0: it is drawn as it is
    if (settings.smooth === "losses") return series.smooth ? LOSS_SHARE : 0;
    return series.stairs || (series.dots && !series.smooth) ? 0 : Number(settings.smooth) / 100;
  }

  const LOSS_SHARE = 0.02;
  const FAR = 3; // a value above so many times the upper quartile of its line is outside of the range

  function shownIn(u, place) { // [x, y] of the points of a line in the range of x
    const [from, to] = u.series[0].idxs, [xs] = u.data;
    return u.data[place].slice(from, to + 1).map((y, at) => [xs[from + at], y]).filter(([, y]) => isNumber(y));
  }

  const placesIn = u => u.series.map((_, place) => place).filter(place => place && u.series[place].show);

  function withoutFar(u, min, max) { // the range of y without values far above the others
    if (min === null) return [null, null];
    const lines = placesIn(u).map(place => shownIn(u, place).map(([, y]) => y).sort((a, b) => a - b));
    const limit = Math.max(...lines.filter(ys => ys.length).map(ys => FAR * ys[Math.floor(0.75 * (ys.length - 1))]));
    const near = lines.flat().filter(y => y <= limit);
    return uPlot.rangeNum(min, near.length ? Math.max(...near) : max, 0.1, true);
  }

  function outside(u, chart, x) { // marks points above the range at its upper edge; returns a sentence about them
    const { ctx, bbox: { top } } = u, size = 5 * devicePixelRatio, found = [];
    for (const place of placesIn(u)) {
      const far = shownIn(u, place).filter(([, y]) => y > u.scales.y.max);
      ctx.fillStyle = u.series[place].stroke();
      for (const [at] of far) {
        const left = u.valToPos(at, "x", true);
        ctx.beginPath();
        ctx.moveTo(left, top);
        ctx.lineTo(left - size, top + 2 * size);
        ctx.lineTo(left + size, top + 2 * size);
        ctx.fill();
      }
      found.push(...far);
    }
    if (!found.length) return "";
    const [at, y] = found.reduce((most, each) => (each[1] > most[1] ? each : most));
    const many = found.length === 1 ? "1 value is" : `${found.length} values are`;
    return `▲ ${many} above the range; the largest is ${told(y, chart.unit, 4)} (${x.label.toLowerCase()}: ${told(at, x.unit, 6)}).`;
  }

  function linesOf(chart) { // [[xs, ys], options] for each line that is drawn
    const logx = settings.logx;
    const lines = [];
    const withRaw = (u, _, place) => [place, place - 1].map(each => told(valueOf(u, each), chart.unit, 5)).join(", raw ");
    for (const series of chart.series) {
      if (series.run !== undefined && !isWanted(page.runs[series.run].label)) continue;
      const stroke = colour(`c${series.colour}`);
      const look = {
        label: series.label, stroke, width: 1.5, scale: "y",
        ...(series.dashed ? { dash: [6, 4] } : {}),
        ...(series.stairs ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
        points: { show: Boolean(series.dots), size: 6, stroke, fill: stroke },
        value: (u, _, place) => told(valueOf(u, place), chart.unit, 5),
      };
      const all = placed(series, series);
      if (!all || !all[0].length) continue;
      const share = shareOf(series);
      if (share) {
        const light = stroke.replace("rgb(", "rgba(").replace(")", ", 0.35)"); // uPlot changes a line's alpha under the cursor
        const points = { ...look.points, size: 4, stroke: light, fill: light };
        lines.push([positive(all, logx, settings.logy),
          { ...look, stroke: light, points, width: 1, class: "raw", label: `${series.label}, as it is` }]);
        const few = series.means ? placed(series, series.means) : all;
        lines.push([positive(smoothed(few, share), logx, settings.logy), { ...look, width: 2, points: { show: false }, value: withRaw }]);
      } else {
        lines.push([positive(all, logx, settings.logy), look]);
      }
    }
    return { lines: lines.filter(([[xs]]) => xs.length), logx };
  }

  function drawLines(chart, holder) {
    const { lines, logx } = linesOf(chart);
    const chosen = chart.axis || page.axes.find(each => each.key === settings.x);
    const any = lines.some(([[, ys]]) => ys.some(y => y !== null));
    if (!any) {
      return nothing(holder, settings.logy ? "No values above 0, which a logarithmic axis could show." : "No values.");
    }
    const data = joined(lines.map(([points]) => points));
    let left = 44;
    const few = data[0].length <= 2, isClipped = chart.clipped && !settings.logy;
    const share = Math.max(...chart.series.map(shareOf));
    const means = share ? `The line is an exponential mean over ${100 * share} % of the x axis to each side; the light line is raw.` : "";
    const note = document.createElement("p");
    note.className = "help";
    note.textContent = means;
    const clip = u => { if (isClipped) note.textContent = `${means} ${outside(u, chart, chosen)}`.trim(); };
    const u = new uPlot({
      width: width(holder), height: (printing ? 180 : 260) * (few ? 0.6 : 1), padding: [10, 22, 0, 0],
      scales: { x: { time: false, distr: logx ? 3 : 1 }, y: { distr: settings.logy ? 3 : 1, ...(isClipped ? { range: withoutFar } : {}) } },
      axes: [
        axis(chosen.unit, { label: chosen.label, labelSize: 18, size: 30, space: chosen.unit === "seconds" ? 90 : 70 }),
        axis(chart.unit, { size: (_, ticks) => (left = ticks ? widthOf(ticks) : left) }),
      ],
      series: [{ label: chosen.label, value: (_, x, __, at) => (at === null ? "last" : told(x, chosen.unit, 6)) }, ...lines.map(([, look]) => look)],
      cursor: {
        sync: { key: chosen.label, setSeries: false },
        drag: { x: true, y: false, dist: 6 }, dataIdx: nearest,
        focus: { prox: 24, dist: (u, place, _, y, at) => (u.series[place].class === "raw" ? Infinity : y - at) },
      },
      focus: { alpha: 0.35 },
      hooks: { ...chosenIn(holder, chosen.label), draw: [boundaries(chart), clip] },
    }, data, holder);
    holder.append(note);
    return u;
  }

  function boundaries(chart) { // vertical lines where the stages of the runs in a chart begin, with their numbers
    const runs = new Set(chart.series.map(series => series.run).filter(run => run !== undefined && isWanted(page.runs[run].label)));
    const found = [...runs].flatMap(run => {
      const stages = page.runs[run].stages || [];
      const points = stages.length && placed({ run }, { x: stages.map(([step]) => step), y: stages.map(([, number]) => number) });
      return points ? points[0].map((x, place) => [x, points[1][place]]) : [];
    });
    return u => {
      const { ctx, bbox: { left, top, width, height } } = u, ratio = devicePixelRatio;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour("faint");
      ctx.lineWidth = ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      for (const [x, number] of found) {
        const at = Math.round(u.valToPos(x, "x", true));
        if (!(at >= left && at <= left + width)) continue; // outside of the range, or no logarithm
        ctx.beginPath();
        ctx.moveTo(at, top);
        ctx.lineTo(at, top + height);
        ctx.stroke();
        ctx.fillText(`stage ${number}`, at + 4 * ratio, top + 10 * ratio);
      }
      ctx.restore();
    };
  }

  function touched(u) { // a finger that moves to the side does what a pressed mouse does
    let start = null;
    const as = (kind, { clientX, clientY }) => {
      // uPlot passes over a move that says it has not moved.
      u.over.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX, clientY, button: 0, movementX: 1 }));
    };
    const on = (kind, then) => u.over.addEventListener(kind, event => event.pointerType === "touch" && then(event));
    on("pointerdown", event => { start = event; as("mousemove", event); as("mousedown", event); });
    on("pointermove", event => start && as("mousemove", event));
    on("pointerup", event => { start = null; as("mouseup", event); });
    on("pointercancel", () => { if (start) { as("mousemove", start); as("mouseup", start); } start = null; }); // it scrolls
  }

  // What a reader chooses in a chart is kept beside the other settings, and comes back when the chart is drawn again.
  function chosenIn(holder, axis) {
    const chart = holder.closest("figure").dataset.chart;
    const zoomed = u => {
      const { left, width } = u.select;
      if (width > 0) { zooms.set(axis, [u.posToVal(left, "x"), u.posToVal(left + width, "x")]); remember(); }
    };
    const left = (u, place, options) => {
      if (place === null) return;
      together(u, place, options);
      if (options.show === undefined) return;
      const out = u.series.filter((each, at) => at && !each.show && each.class !== "raw").map(each => each.label);
      if (out.length) hidden.set(chart, out); else hidden.delete(chart);
      pressedIn(u);
      remember();
    };
    const ready = u => {
      touched(u);
      u.over.addEventListener("dblclick", () => { zooms.delete(axis); remember(); });
      named(u);
      queueMicrotask(() => { // uPlot drops what is set while it draws
        const out = hidden.get(chart) || [];
        u.series.forEach((each, place) => { if (place && out.includes(each.label)) u.setSeries(place, { show: false }); });
        if (zooms.has(axis)) { const [min, max] = zooms.get(axis); u.setScale("x", { min, max }); }
      });
    };
    return { setSelect: [zoomed], setSeries: [left], ready: [ready] };
  }

  const namesOf = u => [...u.root.querySelectorAll(".u-legend .u-series")].slice(1).map(row => row.querySelector("th"));
  const pressedIn = u => namesOf(u).forEach((name, place) => name.setAttribute("aria-pressed", u.series[place + 1].show));

  function named(u) { // a line's name is a button for the keyboard too
    for (const name of namesOf(u)) {
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.addEventListener("keydown", event => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    }
    pressedIn(u);
  }

  function together(u, place, options) { // what is behind a smoothed line goes with it
    const behind = u.series[place - 1];
    if (!behind || behind.class !== "raw") return;
    if (options.focus) behind.alpha = 1;
    if (options.show !== undefined && behind.show !== options.show) u.setSeries(place - 1, { show: options.show });
  }

  function drawSpans(chart, holder) {
    const tables = [], looks = [];
    chart.kinds.forEach((kind, number) => chart.rows.forEach((row, place) => {
      const xs = [], ys = [];
      for (const [begin, end, of] of row.spans) {
        if (of !== number) continue;
        const from = xs.length && begin <= xs[xs.length - 1] ? xs[xs.length - 1] + 1e-6 : begin;
        const to = Math.max(end, from + 1e-6);
        xs.push(from, to, to + 1e-6); ys.push(place, place, null);
      }
      if (!xs.length) return;
      tables.push([xs, ys]);
      looks.push({ label: kind, stroke: colour(`c${number}`), width: chart.thin.includes(number) ? 7 : 18, points: { show: false } });
    }));
    if (!tables.length) return nothing(holder, "Nothing was recorded.");
    const output = holder.parentNode.querySelector("output");
    const rows = chart.rows.map(row => row.label);
    const tell = u => {
      const { left, top } = u.cursor;
      const x = u.posToVal(left, "x"), row = chart.rows[Math.round(u.posToVal(top, "y"))];
      const reach = Math.abs(u.posToVal(left + 3, "x") - x);
      const here = left < 0 || !row ? [] : row.spans.filter(([begin, end]) => begin - reach <= x && x <= end + reach);
      const best = here.length ? here[here.length - 1] : null; // later kinds lie above
      output.textContent = best ? `${row.label}: ${chart.kinds[best[2]]}. ${best[3]}` : "";
    };
    return new uPlot({
      width: width(holder), height: 60 + 30 * rows.length, padding: [8, 22, 0, 0], legend: { show: false },
      scales: { x: { time: false }, y: { range: [-0.6, rows.length - 0.4], dir: -1 } },
      axes: [
        axis(chart.axis.unit, { label: chart.axis.label, labelSize: 18, size: 30, space: 90 }),
        axis("", {
          splits: () => rows.map((_, place) => place), values: () => rows.map(clipped), grid: { show: false },
          ticks: { show: false }, size: widthOf(rows.map(clipped)),
        }),
      ],
      series: [{}, ...looks],
      cursor: { y: false, drag: { x: true, y: false, dist: 6 }, points: { show: false } },
      hooks: { ...chosenIn(holder, holder.closest("figure").dataset.chart), setCursor: [tell] },
    }, joined(tables), holder);
  }

  const clipped = text => (text.length > 20 ? `${text.slice(0, 19)}…` : text);

  function nothing(holder, text) {
    const told = document.createElement("p");
    told.className = "nothing";
    told.textContent = text;
    holder.append(told);
    return null;
  }

  const DRAW = { lines: drawLines, spans: drawSpans };

  function draw(figure) {
    const holder = figure.querySelector(".plot");
    drawn.get(figure)?.destroy();
    holder.replaceChildren();
    const chart = page.charts[figure.dataset.chart];
    drawn.set(figure, DRAW[chart.kind](chart, holder));
  }

  const drawAll = () => document.querySelectorAll("figure[data-chart]").forEach(draw);

  // ---- tables of runs: a heading sorts the rows by its column, the filter leaves out rows, and lines of charts

  const isWanted = label => settings.filter.toLowerCase().split(" ").every(word => label.toLowerCase().includes(word));

  function arrange(table) {
    const headings = [...table.tHead.rows[0].cells], [body] = table.tBodies, sign = settings.sort.startsWith("-") ? -1 : 1;
    const place = headings.findIndex(each => each.textContent === settings.sort.replace(/^-/, ""));
    headings.forEach((each, at) => (each.ariaSort = at !== place ? "none" : sign > 0 ? "ascending" : "descending"));
    for (const row of body.rows) row.hidden = !isWanted(row.cells[0].textContent);
    if (place < 0) return;
    const valueOf = cell => Number(cell.querySelector("data")?.value ?? NaN);
    const compared = (a, b) => { // a run without the value is last
      const [first, second] = [valueOf(a), valueOf(b)], missing = Number.isNaN(first) - Number.isNaN(second);
      if (missing || !Number.isNaN(first)) return missing || sign * (first - second);
      return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
    };
    body.append(...[...body.rows].sort((a, b) => compared(a.cells[place], b.cells[place])));
  }

  const arrangeAll = () => document.querySelectorAll("table.runs").forEach(arrange);

  document.querySelector("main").addEventListener("click", event => {
    const heading = event.target.closest("table.runs th button")?.textContent;
    if (!heading) return;
    settings.sort = settings.sort === heading ? `-${heading}` : heading;
    remember();
    arrangeAll();
  });

  // ---- controls; what is chosen stands behind the # of the address, so that it lasts and can be passed on

  function remembered() {
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
      if (name === "x" && page.axes.some(each => each.key === text)) settings.x = text;
      if (name === "theme" && ["light", "dark"].includes(text)) settings.theme = text;
      if (name === "sort" || (name === "filter" && controls.elements.filter)) settings[name] = text;
      if (name === "logx" || name === "logy") settings[name] = text === "1";
      if (name === "smooth" && [...(controls.elements.smooth?.options ?? [])].some(each => each.value === text)) settings.smooth = text;
      if (name === "zoom" || name === "hide") remembers(name, text);
    }
  }

  function remembers(name, text) { // ["Steps",100,200], ["figures-loss","eval_loss"]
    let found = null;
    try { found = JSON.parse(text); } catch { return; } // an address that was cut off
    if (!Array.isArray(found) || typeof found[0] !== "string") return;
    const [key, ...values] = found;
    if (name === "hide") hidden.set(key, values);
    else if (values.length === 2 && values.every(Number.isFinite) && values[0] < values[1]) zooms.set(key, values);
  }

  function remember() {
    const kept = new URLSearchParams();
    if (page.axes.length && settings.x !== page.axes[0].key) kept.set("x", settings.x);
    if (settings.theme !== "auto") kept.set("theme", settings.theme);
    for (const name of ["filter", "sort"]) if (settings[name]) kept.set(name, settings[name]);
    for (const name of ["logx", "logy"]) if (settings[name]) kept.set(name, "1");
    if (settings.smooth !== "losses") kept.set("smooth", settings.smooth);
    for (const [name, chosen] of [["zoom", zooms], ["hide", hidden]]) {
      for (const [key, values] of chosen) kept.append(name, JSON.stringify([key, ...values]));
    }
    history.replaceState(null, "", `#${kept}`);
  }

  function show() {
    if (settings.theme === "auto") delete root.dataset.theme; else root.dataset.theme = settings.theme;
    for (const input of controls.elements) {
      if (input.type === "checkbox") input.checked = settings[input.id];
      else if (input.id in settings) input.value = settings[input.id];
    }
    arrangeAll();
    drawAll();
  }

  controls.addEventListener("submit", event => event.preventDefault());
  controls.addEventListener("input", event => {
    const { id, type, checked, value } = event.target;
    settings[id] = type === "checkbox" ? checked : value;
    remember();
    show();
  });
  controls.addEventListener("click", event => {
    if (event.target.id !== "reset") return;
    zooms.clear();
    remember();
    drawAll();
  });

  const texts = from => from.querySelector("main").innerHTML + from.getElementById("data").textContent;
  const began = new WeakMap(); // how the page has its folds, before a reader touches them
  const note = from => from.querySelectorAll("details").forEach(each => began.set(each, each.open));
  let seen = texts(document), offered = controls.innerHTML;
  note(document);

  window.gregale = { drawn: figure => drawn.get(figure) }; // for the console of who looks closer

  read(document);
  if (page.axes.length) settings.x = page.axes[0].key;
  remembered();
  show();

  let waits = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(waits);
    waits = requestAnimationFrame(() => drawn.forEach((u, figure) => {
      const now = width(figure.querySelector(".plot"));
      if (u && u.width !== now) u.setSize({ width: now, height: u.height });
    }));
  }).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const folds = [];
  addEventListener("beforeprint", () => {
    printing = true;
    folds.push(...document.querySelectorAll("details:not([open])"));
    folds.forEach(each => (each.open = true));
    root.dataset.theme = "light";
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    folds.splice(0).forEach(each => (each.open = false));
    show();
  });

  // ---- a page that is served while its runs go on: it asks for itself, and keeps what the reader looks at

  async function renewed() {
    const answer = await fetch(location.pathname, { cache: "no-cache" });
    if (!answer.ok) throw new Error(await answer.text());
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (texts(fresh) === seen || pressed) return; // also if a finger came down while the answer was on its way
    seen = texts(fresh);
    const title = fold => fold.querySelector("summary").textContent;
    const touched = [...document.querySelectorAll("details")].filter(each => each.open !== began.get(each));
    const chosen = new Map(touched.map(each => [title(each), each.open]));
    note(fresh);
    for (const each of fresh.querySelectorAll("details")) each.open = chosen.get(title(each)) ?? each.open;
    const height = scrollY;
    drawn.forEach(u => u?.destroy());
    drawn.clear();
    document.getElementById("data").textContent = fresh.getElementById("data").textContent;
    document.querySelector("main").replaceChildren(...fresh.querySelector("main").children);
    document.querySelector("header p").textContent = fresh.querySelector("header p").textContent;
    read(document);
    if (fresh.getElementById("controls").innerHTML !== offered) { // a first step brings axes and scales
      offered = fresh.getElementById("controls").innerHTML;
      controls.replaceChildren(...fresh.getElementById("controls").children);
      remembered();
    }
    show();
    scrollTo(scrollX, height);
  }

  let pressed = false, lost = "";
  addEventListener("pointerdown", () => (pressed = true));
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (pressed = false));

  async function renew() { // not under a finger that chooses a range, and not for nobody
    const about = document.querySelector("header p");
    try {
      if (!pressed && !document.hidden) await renewed();
      about.textContent = about.textContent.replace(lost, "");
      lost = "";
    } catch {
      if (!lost) about.textContent += (lost = " Its run is not watched any more: this is how it was last.");
    }
    setTimeout(renew, 1000 * page.live);
  }
  if (page.live) setTimeout(renew, 1000 * page.live);
})();
