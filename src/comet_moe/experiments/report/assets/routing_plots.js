/* Plots of the routing of each gate's best run. An owner is the task or layer that a gate of the model belongs to. */

const MEAN_OF_OWNERS = "";
const MAX_BANDS = 6;

function ownersOf(section, plot) {
  return [...new Set(section.gates.flatMap((gate) => Object.keys(section.routing[gate]?.[plot] ?? {})))];
}

/* A line per gate: of one owner, or the mean over all owners with a band from the lowest to the highest. */
function ownerLines(view, gate, byOwner) {
  const epochs = epochNumbers(byOwner[0].length);
  const reduce = (make) => epochs.map((_, index) => make(withoutNull(byOwner.map((owner) => owner[index]))));
  return [
    ...(byOwner.length > 1 && view.gates.length <= MAX_BANDS
      ? band(view, gate, epochs, reduce((v) => Math.min(...v)), reduce((v) => Math.max(...v)))
      : []),
    {
      x: epochs,
      y: reduce((v) => v.reduce((sum, value) => sum + value, 0) / v.length),
      mode: "lines+markers",
      line: line(view, gate),
      marker: marker(view, gate, 6, { maxdisplayed: 15 }),
      hovertemplate: `${escapeText(gate)}<br>epoch %{x}: %{y:.3~g}<extra></extra>`,
    },
  ];
}

function epochPlot(measure, title) {
  return {
    controls(section) {
      const owners = ownersOf(section, "epochs");
      const options = [[MEAN_OF_OWNERS, "all, mean and range"], ...owners.map((owner) => [owner, owner])];
      return [{ name: "owner", label: "Task or layer", options, isHidden: owners.length < 2 }];
    },
    draw(section, values, view) {
      const curves = view.gates.flatMap((gate) => {
        const data = section.routing[gate].epochs;
        const owners = values.owner === MEAN_OF_OWNERS ? Object.keys(data) : Object.keys(data).filter((owner) => owner === values.owner);
        return owners.length ? [[gate, owners.map((owner) => data[owner][measure])]] : [];
      });
      const last = Math.max(1, ...curves.map(([, byOwner]) => byOwner[0].length));
      return {
        traces: curves.flatMap(([gate, byOwner]) => ownerLines(view, gate, byOwner)),
        layout: makeLayout(view, epochAxis(view, last), axis(view, title, { rangemode: "tozero" })),
      };
    },
  };
}

PLOTS.information = epochPlot("information", "information (nats)");
PLOTS.effective = epochPlot("effective", "effective experts");

const LOADS = { ideal: "load / ideal", samples: "share of samples", weight: "share of weight" };

/* Values of a row of the load plot: shares, or the loads divided by their mean, which is the ideal. */
function loadValues(load, show) {
  if (show !== "ideal") return load[show];
  const mean = load.samples.reduce((sum, share) => sum + share, 0) / load.samples.length;
  return load.samples.map((share) => (mean ? share / mean : 0));
}

PLOTS.load = {
  controls: () => [{ name: "show", label: "Show", options: Object.entries(LOADS) }],
  draw(section, values, view) {
    const isRatio = values.show === "ideal";
    const hasOwners = view.gates.some((gate) => Object.keys(section.routing[gate].load).length > 1);
    const rows = view.gates.flatMap((gate, gateIndex) => [
      ...(gateIndex && hasOwners ? [null] : []),
      ...Object.entries(section.routing[gate].load).map(([owner, load]) => ({ gate, owner, shown: loadValues(load, values.show) })),
    ]);
    const filled = rows.filter(Boolean);
    const count = Math.max(...filled.map((row) => row.shown.length));
    const isWide = view.width > 640;
    const format = (value) => (isRatio ? formatRatio(value) : formatPercent(value));
    const cellText = (value) => {
      if (count > 64) return "";
      if (count > 16 || !isWide) return "";
      return isRatio ? formatRatio(value) : value >= 0.005 ? Math.round(100 * value) : "";
    };
    const rowName = ({ gate, owner }) => `<b>${escapeText(gate)}</b>${hasOwners ? `  ${escapeText(owner)}` : ""}`;
    const cells = (row, make, missing = null) =>
      Array.from({ length: count }, (_, expert) => (row && expert < row.shown.length ? make(row.shown[expert]) : missing));
    const ticks = { tickfont: { color: view.theme.muted }, thickness: 10, outlinewidth: 0, len: 1 };
    const scale = isRatio
      ? {
          zmin: -LARGEST_LOG_RATIO,
          zmax: LARGEST_LOG_RATIO,
          colorscale: view.theme.ratio,
          colorbar: { ...ticks, tickvals: [-2, -1, 0, 1, 2], ticktext: ["\u00bc", "\u00bd", "1", "2", "4"] },
        }
      : {
          zmin: 0,
          zmax: Math.max(...filled.flatMap((row) => row.shown)),
          colorscale: view.theme.heat,
          colorbar: { ...ticks, tickformat: ".0%" },
        };
    const common = {
      type: "heatmap",
      texttemplate: "%{text}",
      hovertext: rows.map((row) => cells(row, () => rowName(row))),
      hoverongaps: false,
      xgap: count > 64 ? 0 : 2,
      ygap: count > 64 ? 1 : 2,
    };
    return {
      traces: [
        {
          ...common,
          z: rows.map((row) => cells(row, (share) => (share === 0 ? null : isRatio ? logRatio(share) : share))),
          text: rows.map((row) => cells(row, cellText, "")),
          textfont: { size: 11, ...(isRatio ? { color: view.theme.ink } : {}) },
          customdata: rows.map((row) => cells(row, format)),
          hovertemplate: "%{hovertext}<br>expert %{x}: %{customdata}<extra></extra>",
          showscale: isWide && rows.length > 4,  // with fewer rows its labels overlap, and cells have numbers
          ...scale,
        },
        {
          ...common,
          z: rows.map((row) => cells(row, (share) => (share === 0 ? 1 : null))),
          text: rows.map((row) => cells(row, (share) => (share === 0 && count <= 64 ? "\u00d7" : ""), "")),
          textfont: { size: 11, color: view.theme.deadInk },
          hovertemplate: "%{hovertext}<br>expert %{x}: dead, no sample selects it<extra></extra>",
          showscale: false,
          zmin: 0,
          zmax: 1,
          colorscale: [[0, view.theme.dead], [1, view.theme.dead]],
        },
      ],
      layout: makeLayout(
        view,
        axis(view, "expert", {
          showgrid: false, dtick: count > 32 ? undefined : isWide ? 1 : Math.ceil(count / 8), tickangle: 0,
        }),
        axis(view, "", {
          showgrid: false,
          autorange: "reversed",
          tickvals: rows.flatMap((row, index) => (row ? [index] : [])),
          ticktext: filled.map(rowName),
        }),
        { height: 70 + rows.length * (view.width < 500 ? 22 : 26) }
      ),
    };
  },
};

const MEASURES = {
  one_hot: "share of one-hot trees",
  entropy: "entropy of the trees (nats)",
  experts: "experts per sample",
};

PLOTS.convergence = {
  controls: () => [{ name: "measure", label: "Show", options: Object.entries(MEASURES) }],
  draw(section, values, view) {
    const traces = [];
    let last = 1;
    for (const gate of view.gates) {
      const byOwner = Object.values(section.routing[gate].convergence).map((owner) => owner[values.measure]);
      last = Math.max(last, byOwner[0].length);
      traces.push(...ownerLines(view, gate, byOwner));
    }
    const yaxis = values.measure === "one_hot" ? { range: [-0.03, 1.03], tickformat: ".0%" } : { rangemode: "tozero" };
    return { traces, layout: makeLayout(view, epochAxis(view, last), axis(view, MEASURES[values.measure], yaxis)) };
  },
};

/* Controls of a figure that shows one gate at one epoch. */
function gateControls(section, values, plot) {
  const gates = section.gates.filter((gate) => section.routing[gate]?.[plot]);
  const gate = gates.includes(values.gate) ? values.gate : gates[gates.length - 1];
  const data = section.routing[gate][plot];
  const describe = ({ epoch, soft }) => (soft === undefined ? String(epoch) : `${epoch} (${soft ? "soft" : "hard"})`);
  return {
    data,
    gateControl: { name: "gate", label: "Gate", options: gates.map((name) => [name, name]), value: gate },
    epochControl: {
      name: "frame", label: "Epoch", count: data.frames.length, describe: (index) => describe(data.frames[index]),
    },
  };
}

PLOTS.permutation = {
  controls(section, values) {
    const { data, gateControl, epochControl } = gateControls(section, values, "permutation");
    const options = data.names.map((name, index) => [String(index), name]);
    return [
      gateControl,
      { name: "permutation", label: "Permutation of", options, isHidden: options.length < 2 },
      epochControl,
    ];
  },
  draw(section, values, view) {
    const { size, frames } = section.routing[values.gate].permutation;
    const { soft, permutations } = frames[values.frame];
    const { matrix, order } = permutations[Number(values.permutation)];
    const ticks = { showgrid: false, dtick: size <= 16 ? 1 : size <= 32 ? 2 : undefined, constrain: "domain", tickangle: 0 };
    return {
      traces: [
        {
          type: "heatmap",
          z: matrix ? denseMatrix(size, matrix) : order.map((expert) => order.map((_, other) => Number(other === expert))),
          zmin: 0,
          zmax: 1,
          colorscale: view.theme.heat,
          xgap: size > 64 ? 0 : 1,
          ygap: size > 64 ? 0 : 1,
          showscale: false,
          hovertemplate: "gate output %{y} to expert %{x}: %{z:.3f}<extra></extra>",
        },
      ],
      layout: makeLayout(
        view,
        axis(view, "expert", ticks),
        axis(view, "output of the gate", { ...ticks, autorange: "reversed", scaleanchor: "x" }),
        { height: Math.min(view.width, 480) }
      ),
      order: { title: soft ? "Current order, used in evaluation" : "Final order", experts: order },
    };
  },
};

/* entries: position, thousandths, position, ... */
function denseMatrix(size, entries) {
  const rows = Array.from({ length: size }, () => Array(size).fill(0));
  for (let index = 0; index < entries.length; index += 2) {
    rows[Math.floor(entries[index] / size)][entries[index] % size] = entries[index + 1] / 1000;
  }
  return rows;
}
