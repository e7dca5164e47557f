"use strict";

/* How gates look: colour and marker show the family, a dashed line and an open marker show local search (+). */

const MARKERS = {
  dense: "cross", "dense-wide": "bowtie", "dense-per-task": "pentagon", softmax: "circle", hash: "square",
  topk: "triangle-up", switch: "triangle-down", sigmoid: "hourglass", dselect: "diamond", relu: "triangle-right",
  "hash-k": "hexagon", "product-keys": "triangle-left", comet: "star",
};
const OUTLINES = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  square: "M-3.6,-3.6H3.6V3.6H-3.6Z",
  "triangle-up": "M0,-4.6L4.6,3.6H-4.6Z",
  "triangle-down": "M0,4.6L4.6,-3.6H-4.6Z",
  "triangle-right": "M4.6,0L-3.6,4.6V-4.6Z",
  "triangle-left": "M-4.6,0L3.6,-4.6V4.6Z",
  cross: "M-1.6,-4.6H1.6V-1.6H4.6V1.6H1.6V4.6H-1.6V1.6H-4.6V-1.6H-1.6Z",
  hourglass: "M-4,-4.4H4L-4,4.4H4Z",
  pentagon: "M0,-5L4.8,-1.5L2.9,4H-2.9L-4.8,-1.5Z",
  bowtie: "M-4.4,-4V4L4.4,-4V4Z",
  hexagon: "M-4.6,0L-2.3,-4H2.3L4.6,0L2.3,4H-2.3Z",
  diamond: "M0,-5L4.4,0L0,5L-4.4,0Z",
  star: "M0,-5.4L1.4,-1.8L5.2,-1.7L2.2,.7L3.2,4.4L0,2.3L-3.2,4.4L-2.2,.7L-5.2,-1.7L-1.4,-1.8Z",
  x: "M-4,-4L4,4M4,-4L-4,4",
};

function gateStyle(network) {
  const [gate] = network.split("@");
  const isSearched = gate.endsWith("+");
  const family = isSearched ? gate.slice(0, -1) : gate;
  if (/^dense-[\d.]+x$/.test(family)) return { ...gateStyle("dense"), isSearched, dash: "solid" };
  const isKnown = Object.hasOwn(MARKERS, family);
  return {
    variable: `--gate-${isKnown ? family : "other"}`,
    marker: isKnown ? MARKERS[family] : "x",
    isSearched,
    dash: isSearched ? "dash" : "solid",
  };
}

function currentTheme() {
  const computed = getComputedStyle(document.documentElement);
  const color = (name) => computed.getPropertyValue(name).trim();
  const pale = (name) => mix(color("--paper"), color(name), RATIO_OPACITY);
  return {
    ink: color("--ink"),
    muted: color("--muted"),
    line: color("--line"),
    grid: color("--grid"),
    paper: color("--paper"),
    gate: (name) => color(gateStyle(name).variable),
    dead: color("--dead"),
    deadInk: color("--dead-ink"),
    above: color("--above"),
    below: color("--below"),
    ratio: [[0, pale("--below")], [0.5, color("--paper")], [1, pale("--above")]],
    heat: [0, 0.25, 0.6, 1].map((share, index) => [share, color(`--heat-${index}`)]),
  };
}

function channels(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

function withAlpha(hex, alpha) {
  return `rgba(${channels(hex).join(",")},${alpha})`;
}

/* The colour that ``hex`` with this opacity has on a background. */
function mix(background, hex, opacity) {
  const below = channels(background);
  return `rgb(${channels(hex).map((value, index) => Math.round(opacity * value + (1 - opacity) * below[index])).join(",")})`;
}

function swatch(gate) {
  const style = gateStyle(gate);
  const color = `var(${style.variable})`;
  const dash = style.isSearched ? ' stroke-dasharray="5 3"' : "";
  const fill = style.isSearched ? "var(--paper)" : color;
  return `<svg viewBox="0 0 36 14" aria-hidden="true"><line x1="1" y1="7" x2="35" y2="7" stroke="${color}"` +
    ` stroke-width="2.4"${dash}/><path transform="translate(18 7)" d="${OUTLINES[style.marker]}" fill="${fill}"` +
    ` stroke="${color}" stroke-width="1.6"/></svg>`;
}

/* Plotly interprets some HTML in its texts: names are escaped. */
function escapeText(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function formatPercent(share) {
  if (share > 0 && share < 0.001) return "<0.1 %";
  return `${Number((100 * share).toFixed(share < 0.1 ? 1 : 0))} %`;
}

/* Ratios such as 2 and 1/2 are equally far from 1; colours end at 4 and 1/4, pale enough for text on them. */
const LARGEST_LOG_RATIO = 2;
const RATIO_OPACITY = 0.6;

function logRatio(ratio) {
  return Math.max(-LARGEST_LOG_RATIO, Math.min(LARGEST_LOG_RATIO, Math.log2(ratio)));
}

function formatRatio(ratio) {
  if (ratio === 0) return "0";
  return ratio < 0.05 ? "<0.1" : ratio.toFixed(ratio < 9.95 ? 1 : 0);
}
