/* The trees of a gate, drawn from left to right: as wide a branch as samples go down it. */

const ROW = 22;
const MANY = 32;

/* The heap with these leaves (first to last), each node with its share and row. Where there are many leaves, a
   branch that gets less than 1 % is not drawn, and a node whose branches all are so small ends in a row itself. */
function heapTree(shares) {
  const internal = shares.length - 1;
  const least = shares.length > MANY ? 0.01 : -1;
  const rows = [];
  let next = 0;
  const visit = (place, depth) => {
    if (place >= internal) return { depth, leaf: next, size: 1, share: shares[next++], children: [] };
    const children = [visit(2 * place + 1, depth + 1), visit(2 * place + 2, depth + 1)];
    const [size, share] = ["size", "share"].map((name) => children[0][name] + children[1][name]);
    return { depth, size, share, children };
  };
  const settle = (node) => {
    node.children = node.children.filter((child) => child.share >= least);
    node.children.forEach(settle);
    node.ends = !node.children.length;
    node.row = node.ends
      ? rows.push(node) - 1
      : node.children.reduce((sum, child) => sum + child.row, 0) / node.children.length;
  };
  const root = visit(0, 0);
  settle(root);
  return { root, rows };
}

function drawTree(shares, labelOf, color, width) {
  const { root, rows } = heapTree(shares);
  const depth = Math.max(1, ...rows.map((node) => node.depth));
  const labels = Math.min(184, 0.55 * width);
  const across = (node) => 12 + ((width - labels - 12) * (node.ends ? depth : node.depth)) / depth;
  const down = (node) => ROW * (node.row + 0.5);
  const worthALabel = shares.length > MANY ? 0.1 : 0.01;
  const edges = { used: [], unused: [] };
  const texts = [];
  const visit = (node) => {
    for (const child of node.children) {
      const [x, y, toX, toY] = [across(node), down(node), across(child), down(child)];
      const middle = x + (toX - x) * 0.55;
      const used = child.share >= 0.0005;
      edges[used ? "used" : "unused"].push(
        `<path d="M${x},${y}C${middle},${y} ${middle},${toY} ${toX},${toY}" fill="none" stroke="${used ? color : "var(--line)"}"` +
        ` stroke-width="${used ? 1 + 12 * child.share : 1}"${used ? "" : ' stroke-dasharray="2 3"'} stroke-linecap="round">` +
        `<title>${percent(child.share)} of the samples</title></path>`
      );
      if (!child.ends && child.share >= worthALabel && child.share < 0.995) {
        const away = toY > y ? 14 + 6 * child.share : -5 - 6 * child.share;  // the outer side of the bend
        texts.push(`<text class="halo" x="${toX - 4}" y="${toY + away}" text-anchor="end">${percent(child.share)}</text>`);
      }
      visit(child);
    }
  };
  visit(root);
  const named = (node) => (node.leaf === undefined ? `${node.size} small leaves` : labelOf(node.leaf));
  for (const node of rows) {
    const faint = node.share < 0.0005 || node.leaf === undefined ? ' class="faint"' : "";
    texts.push(`<text${faint} x="${across(node) + 12}" y="${down(node) + 4}">${named(node)}</text>`);
    texts.push(`<text${faint} x="${width - 2}" y="${down(node) + 4}" text-anchor="end">${percent(node.share)}</text>`);
  }
  const said = rows.filter((node) => node.share >= 0.01).map((node) => `${named(node)} ${percent(node.share)}`);
  return `<svg viewBox="0 0 ${width} ${ROW * rows.length}" role="img" aria-label="Tree: ${said.join(", ")}">` +
    [...edges.unused, ...edges.used].join("") +
    `<circle cx="12" cy="${down(root)}" r="5" fill="${color}"/>${texts.join("")}</svg>`;
}

const TREES = {
  controls(chapter, values) {
    const gates = chapter.gates.filter((gate) => chapter.best[gate]?.trees);
    const gate = gates.includes(values.gate) ? values.gate : gates[gates.length - 1];
    const { frames } = chapter.best[gate].trees;
    const tasks = Object.keys(frames[0].tasks);
    return [
      { name: "gate", label: "Gate", options: gates.map((name) => [name, name]), value: gate },
      { name: "task", label: "Task", options: tasks.map((task) => [task, task]), hidden: tasks.length < 2 },
      { name: "frame", label: "Epoch", count: frames.length, said: (place) => String(frames[place].epoch) },
    ];
  },
  draw(chapter, values, canvas, whole) {
    const { frames, orders, codes } = chapter.best[values.gate].trees;
    const { shares, order } = frames[values.frame].tasks[values.task];
    const color = `var(${gateLook(values.gate).variable})`;
    const columns = Math.min(shares.length, Math.max(1, Math.floor((whole + 32) / 352)));
    const width = (whole - 32 * (columns - 1)) / columns;
    canvas.innerHTML = shares.map((given, tree) => {
      const size = given.length;
      const leaves = codes ? 2 ** Math.ceil(Math.log2(size)) : size;
      const padded = Array.from({ length: leaves }, (_, leaf) => (given[leaf] ?? 0) / 10000);
      const permuted = order ? orders[order[tree]] : null;
      const labelOf = (leaf) =>
        leaf >= size ? "no expert" : permuted ? `leaf ${leaf} \u2192 expert ${permuted[leaf]}` : `expert ${leaf}`;
      return `<div><h4>${codes ? "Selector" : "Tree"} ${tree + 1}</h4>${drawTree(padded, labelOf, color, width)}</div>`;
    }).join("");
    return { note: shares[0].length > MANY ? "Branches that get less than 1 % are not drawn." : "" };
  },
};
