/* What the plots share: axes, layout, markers, bands.
   view: how to draw now (theme, width, isPrinting, isTouch, and the gates to draw). */

const NO_HOVER = { hoverinfo: "skip", showlegend: false };
const MARKER_SCALES = {
  star: 1.45, "triangle-up": 1.2, "triangle-down": 1.2, "triangle-right": 1.2, diamond: 1.15, cross: 1.15, hourglass: 1.1, bowtie: 1.1,
};  // all markers look as large as a circle

/* One entry per figure. controls(section, values) lists its controls, draw(section, values, view) returns traces
   and layout for Plotly, and the note below. section: data of one study; values: of the controls. */
const PLOTS = {};

/* As PLOTS, but draw(section, values, canvas, width) writes HTML into the canvas and returns the note only. */
const HTML_PLOTS = {};

function axis(view, title, more = {}) {
  return {
    title: { text: title, font: { size: 13 }, standoff: 8 },
    color: view.theme.muted,
    gridcolor: view.theme.grid,
    linecolor: view.theme.line,
    zeroline: false,
    automargin: true,
    ...more,
  };
}

function makeLayout(view, xaxis, yaxis, more = {}) {
  const { theme } = view;
  return {
    font: { family: "system-ui, sans-serif", size: view.width < 500 ? 11 : 12.5, color: theme.ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 10, t: 10, b: 40 },
    height: view.width < 500 || view.isPrinting ? 290 : 380,
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: theme.paper, bordercolor: theme.line, font: { color: theme.ink, size: 12.5 }, align: "left" },
    dragmode: view.isTouch ? false : "zoom",
    xaxis,
    yaxis,
    ...more,
  };
}

function marker(view, gate, size, more = {}) {
  const { marker: symbol, isSearched } = gateStyle(gate);
  const color = view.theme.gate(gate);
  const isOpen = isSearched || symbol === "x";
  return {
    symbol: isOpen ? `${symbol}-open` : symbol,
    color,
    size: size * (MARKER_SCALES[symbol] ?? 1),
    line: { color, width: isOpen ? 1.6 : 0 },
    ...more,
  };
}

function line(view, gate, more = {}) {
  return { color: view.theme.gate(gate), dash: gateStyle(gate).dash, width: 2.2, ...more };
}

function band(view, gate, x, low, high) {
  const fillcolor = withAlpha(view.theme.gate(gate), 0.11);
  const edge = { mode: "lines", line: { width: 0 }, x, ...NO_HOVER };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor }];
}

function withoutNull(values) {
  return values.filter((value) => value !== null);
}

/* A range without outliers far above the other values, and how many there are; no range if there are none. */
function rangeWithoutOutliers(values) {
  const sorted = withoutNull(values).sort((a, b) => a - b);
  const quantile = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [sorted[0], sorted[sorted.length - 1]];
  const limit = quantile(0.75) + 3 * (quantile(0.75) - quantile(0.25));
  if (!(limit - low < 0.4 * (high - low))) return { range: undefined, outliers: 0 };
  const shown = sorted.filter((value) => value <= limit);
  const top = shown[shown.length - 1];
  const padding = 0.06 * (top - low || 1);
  return { range: [low - padding, top + padding], outliers: sorted.length - shown.length };
}

function outlierNote(section, count) {
  if (!count) return "";
  const subject = count === 1 ? `1 ${section.noun} is` : `${count} ${section.noun}s are`;
  return `${subject} above the visible range; double-click the plot to see all points.`;
}

/* A logarithmic axis with ticks such as 0.002 or 1e-4, not powers in small print. */
function logAxis(values) {
  const positive = values.filter((value) => value > 0);
  const [low, high] = [Math.min(...positive), Math.max(...positive)];
  const first = Math.floor(Math.log10(low));
  const decades = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, index) => first + index);
  const ticks = (factors) =>
    decades.flatMap((decade) => factors.map((factor) => Number(`${factor}e${decade}`)))
      .filter((tick) => tick >= low * 0.9 && tick <= high * 1.1);
  const fine = ticks([1, 2, 5]);
  const tickvals = fine.length > 9 ? ticks([1]) : fine;
  return { type: "log", tickvals, ticktext: tickvals.map(formatTick) };
}

function formatTick(tick) {
  if (tick < 0.001) return tick.toExponential();
  if (tick < 1000) return String(tick);
  let power = 1;
  while (power < 4 && tick >= 1000 ** (power + 1)) power += 1;
  return `${Number((tick / 1000 ** power).toPrecision(3))}${["", "k", "M", "G", "T"][power]}`;
}

function epochAxis(view, count) {
  return axis(view, "epoch", { range: [1 - 0.03 * count, count * 1.03], ...(count <= 12 ? { dtick: 1 } : {}) });
}

function epochNumbers(count) {
  return Array.from({ length: count }, (_, index) => index + 1);
}

/* Between -0.5 and 0.5, different for neighbours and the same each time: separates points of equal value. */
function jitter(index) {
  return ((index * 0.618034) % 1) - 0.5;
}

function pointOpacity(count) {
  return count > 60 ? 0.55 : 0.85;
}
