/* The trees of a gate as SVG, root on the left: the width of a branch is the share of samples that follow it. */

const ROW_HEIGHT = 22;
const MANY_LEAVES = 32;
const COLUMN_GAP = 32;
const COLUMN_WIDTH = 320;

/* The complete binary tree with these leaves, from first to last, each node with its share and row. If there are
   many leaves, branches below 1 % are not drawn, and a node with only such branches is drawn as a leaf. */
function layoutTree(shares) {
  const internal = shares.length - 1;
  const smallest = shares.length > MANY_LEAVES ? 0.01 : -1;
  const rows = [];
  let nextLeaf = 0;
  const build = (index, depth) => {
    if (index >= internal) return { depth, leaf: nextLeaf, size: 1, share: shares[nextLeaf++], children: [] };
    const children = [build(2 * index + 1, depth + 1), build(2 * index + 2, depth + 1)];
    const [size, share] = ["size", "share"].map((name) => children[0][name] + children[1][name]);
    return { depth, size, share, children };
  };
  const assignRow = (node) => {
    node.children = node.children.filter((child) => child.share >= smallest);
    node.children.forEach(assignRow);
    node.isLast = !node.children.length;
    node.row = node.isLast
      ? rows.push(node) - 1
      : node.children.reduce((sum, child) => sum + child.row, 0) / node.children.length;
  };
  const root = build(0, 0);
  assignRow(root);
  return { root, rows };
}

function drawTree(shares, leafName, color, width) {
  const { root, rows } = layoutTree(shares);
  const depth = Math.max(1, ...rows.map((node) => node.depth));
  const labelWidth = Math.min(184, 0.55 * width);
  const xOf = (node) => 12 + ((width - labelWidth - 12) * (node.isLast ? depth : node.depth)) / depth;
  const yOf = (node) => ROW_HEIGHT * (node.row + 0.5);
  const smallestLabel = shares.length > MANY_LEAVES ? 0.1 : 0.01;
  const branches = { used: [], unused: [] };
  const texts = [];
  const visit = (node) => {
    for (const child of node.children) {
      const [x, y, toX, toY] = [xOf(node), yOf(node), xOf(child), yOf(child)];
      const middle = x + (toX - x) * 0.55;
      const isUsed = child.share >= 0.0005;
      const stroke = isUsed
        ? `stroke="${color}" stroke-width="${1 + 12 * child.share}"`
        : 'stroke="var(--line)" stroke-width="1" stroke-dasharray="2 3"';
      branches[isUsed ? "used" : "unused"].push(
        `<path d="M${x},${y}C${middle},${y} ${middle},${toY} ${toX},${toY}" fill="none" ${stroke} stroke-linecap="round">` +
        `<title>${escapeText(formatPercent(child.share))} of the samples</title></path>`
      );
      if (!child.isLast && child.share >= smallestLabel && child.share < 0.995) {
        const offset = toY > y ? 14 + 6 * child.share : -5 - 6 * child.share;  // on the outer side of the bend
        texts.push(
          `<text class="halo" x="${toX - 4}" y="${toY + offset}" text-anchor="end">${escapeText(formatPercent(child.share))}</text>`
        );
      }
      visit(child);
    }
  };
  visit(root);
  const nodeName = (node) => (node.leaf === undefined ? `${node.size} small leaves` : leafName(node.leaf));
  for (const node of rows) {
    const faint = node.share < 0.0005 || node.leaf === undefined ? ' class="faint"' : "";
    const share = escapeText(formatPercent(node.share));
    texts.push(`<text${faint} x="${xOf(node) + 12}" y="${yOf(node) + 4}">${nodeName(node)}</text>`);
    texts.push(`<text${faint} x="${width - 2}" y="${yOf(node) + 4}" text-anchor="end">${share}</text>`);
  }
  const described = rows.filter((node) => node.share >= 0.01).map((node) => `${nodeName(node)} ${formatPercent(node.share)}`);
  return `<svg viewBox="0 0 ${width} ${ROW_HEIGHT * rows.length}" role="img" aria-label="Tree: ${described.join(", ")}">` +
    [...branches.unused, ...branches.used].join("") +
    `<circle cx="12" cy="${yOf(root)}" r="5" fill="${color}"/>${texts.join("")}</svg>`;
}

HTML_PLOTS.trees = {
  controls(section, values) {
    const { data, gateControl, epochControl } = gateControls(section, values, "trees");
    const owners = Object.keys(data.frames[0].gates);
    return [
      gateControl,
      { name: "owner", label: "Task or layer", options: owners.map((owner) => [owner, owner]), isHidden: owners.length < 2 },
      epochControl,
    ];
  },
  draw(section, values, canvas, width) {
    const { frames, orders, selectors } = section.routing[values.gate].trees;
    const { shares: trees, order } = frames[values.frame].gates[values.owner];
    const color = `var(${gateStyle(values.gate).variable})`;
    const columns = Math.min(trees.length, Math.max(1, Math.floor((width + COLUMN_GAP) / (COLUMN_WIDTH + COLUMN_GAP))));
    const treeWidth = (width - COLUMN_GAP * (columns - 1)) / columns;
    canvas.innerHTML = trees.map((shares, tree) => {
      const experts = shares.length;
      const leaves = selectors ? 2 ** Math.ceil(Math.log2(experts)) : experts;
      const padded = Array.from({ length: leaves }, (_, leaf) => (shares[leaf] ?? 0) / 10000);
      const permuted = order ? orders[order[tree]] : null;
      const leafName = (leaf) =>
        leaf >= experts ? "no expert" : permuted ? `leaf ${leaf} \u2192 expert ${permuted[leaf]}` : `expert ${leaf}`;
      return `<div><h4>${selectors ? "Selector" : "Tree"} ${tree + 1}</h4>${drawTree(padded, leafName, color, treeWidth)}</div>`;
    }).join("");
    return { note: trees[0].length > MANY_LEAVES ? "Branches with less than 1 % of the samples are not drawn." : "" };
  },
};
