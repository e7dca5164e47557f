"use strict";

/* How gates look: colour and marker show the family, a dashed line and an open marker show local search (+). */

const MARKERS = { softmax: "circle", hash: "square", topk: "triangle-up", dselect: "diamond", comet: "star" };
const OUTLINES = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  square: "M-3.6,-3.6H3.6V3.6H-3.6Z",
  "triangle-up": "M0,-4.6L4.6,3.6H-4.6Z",
  diamond: "M0,-5L4.4,0L0,5L-4.4,0Z",
  star: "M0,-5.4L1.4,-1.8L5.2,-1.7L2.2,.7L3.2,4.4L0,2.3L-3.2,4.4L-2.2,.7L-5.2,-1.7L-1.4,-1.8Z",
  x: "M-4,-4L4,4M4,-4L-4,4",
};

function gateStyle(gate) {
  const isSearched = gate.endsWith("+");
  const family = isSearched ? gate.slice(0, -1) : gate;
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
  return {
    ink: color("--ink"),
    muted: color("--muted"),
    line: color("--line"),
    grid: color("--grid"),
    paper: color("--paper"),
    gate: (name) => color(gateStyle(name).variable),
    heat: [0, 0.25, 0.6, 1].map((share, index) => [share, color(`--heat-${index}`)]),
  };
}

function withAlpha(hex, alpha) {
  const channels = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${channels.join(",")},${alpha})`;
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
