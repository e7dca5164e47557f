/* Plots of the routing of each gate's best run. An owner is the task or layer that a gate of the model belongs to. */

PLOTS.load = {
  controls: () => [
    { name: "share", label: "Show", options: [["samples", "share of samples"], ["weight", "share of weight"]] },
  ],
  draw(section, values, view) {
    const hasOwners = view.gates.some((gate) => Object.keys(section.routing[gate].load).length > 1);
    const rows = view.gates.flatMap((gate, gateIndex) => [
      ...(gateIndex && hasOwners ? [null] : []),
      ...Object.entries(section.routing[gate].load).map(([owner, load]) => ({ gate, owner, shares: load[values.share] })),
    ]);
    const filled = rows.filter(Boolean);
    const count = Math.max(...filled.map((row) => row.shares.length));
    const isWide = view.width > 640;
    const cellText = (share) => {
      if (count > 64) return "";
      if (share === 0) return "\u00d7";
      return count <= 16 && isWide && share >= 0.005 ? Math.round(100 * share) : "";
    };
    const rowName = ({ gate, owner }) => `<b>${escapeText(gate)}</b>${hasOwners ? `  ${escapeText(owner)}` : ""}`;
    const cells = (row, make, missing = null) =>
      Array.from({ length: count }, (_, expert) => (row && expert < row.shares.length ? make(row.shares[expert]) : missing));
    return {
      traces: [
        {
          type: "heatmap",
          z: rows.map((row) => cells(row, (share) => share)),
          text: rows.map((row) => cells(row, cellText, "")),
          texttemplate: "%{text}",
          textfont: { size: 11 },
          customdata: rows.map((row) => cells(row, formatPercent)),
          hovertext: rows.map((row) => cells(row, () => rowName(row))),
          hovertemplate: "%{hovertext}<br>expert %{x}: %{customdata}<extra></extra>",
          hoverongaps: false,
          zmin: 0,
          zmax: Math.max(...filled.flatMap((row) => row.shares)),
          colorscale: view.theme.heat,
          xgap: count > 64 ? 0 : 2,
          ygap: count > 64 ? 1 : 2,
          showscale: isWide,
          colorbar: { thickness: 10, outlinewidth: 0, tickformat: ".0%", len: 1, tickfont: { color: view.theme.muted } },
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
      const epochs = epochNumbers(byOwner[0].length);
      last = Math.max(last, epochs.length);
      const reduce = (make) => epochs.map((_, index) => make(withoutNull(byOwner.map((owner) => owner[index]))));
      if (byOwner.length > 1) {
        traces.push(...band(view, gate, epochs, reduce((v) => Math.min(...v)), reduce((v) => Math.max(...v))));
      }
      traces.push({
        x: epochs,
        y: reduce((v) => v.reduce((sum, value) => sum + value, 0) / v.length),
        mode: "lines+markers",
        line: line(view, gate),
        marker: marker(view, gate, 6, { maxdisplayed: 15 }),
        hovertemplate: `${escapeText(gate)}<br>epoch %{x}: %{y:.3~g}<extra></extra>`,
      });
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
