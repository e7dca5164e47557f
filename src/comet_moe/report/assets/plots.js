/* One entry a kind of plot: which controls it has, and what Plotly draws for their values.
   chapter: the data block of one study; values: of the controls; look: theme, width, the gates to draw. */

const FLAT = { hoverinfo: "skip", showlegend: false };
const SCALES = { star: 1.45, "triangle-up": 1.2, diamond: 1.15 };  // to look as large as a circle

function axis(look, title, more = {}) {
  return {
    title: { text: title, font: { size: 13 }, standoff: 8 },
    color: look.theme.muted,
    gridcolor: look.theme.grid,
    linecolor: look.theme.line,
    zeroline: false,
    automargin: true,
    ...more,
  };
}

function frame(look, x, y, more = {}) {
  const { theme } = look;
  return {
    font: { family: "system-ui, sans-serif", size: look.width < 500 ? 11 : 12.5, color: theme.ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 10, t: 10, b: 40 },
    height: look.width < 500 || look.printing ? 290 : 380,
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: theme.paper, bordercolor: theme.line, font: { color: theme.ink, size: 12.5 }, align: "left" },
    dragmode: look.touch ? false : "zoom",
    xaxis: x,
    yaxis: y,
    ...more,
  };
}

function marker(look, gate, size, more = {}) {
  const { marker: symbol, searched } = gateLook(gate);
  const color = look.theme.gate(gate);
  const open = searched || symbol === "x";
  const scale = SCALES[symbol] ?? 1;
  return {
    symbol: open ? `${symbol}-open` : symbol,
    color,
    size: Array.isArray(size) ? size.map((one) => one * scale) : size * scale,
    line: { color, width: open ? 1.6 : 0 },
    ...more,
  };
}

function line(look, gate, more = {}) {
  return { color: look.theme.gate(gate), dash: gateLook(gate).dash, width: 2.2, ...more };
}

function band(look, gate, x, low, high) {
  const fillcolor = withAlpha(look.theme.gate(gate), 0.11);
  const edge = { mode: "lines", line: { width: 0 }, x, ...FLAT };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor }];
}

/* A few values far above the rest would press it flat: the frame ends below them, and the note counts them. */
function crowd(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [sorted[0], sorted[sorted.length - 1]];
  const limit = at(0.75) + 3 * (at(0.75) - at(0.25));
  if (!(limit - low < 0.4 * (high - low))) return { range: undefined, left: 0 };
  const shown = sorted.filter((value) => value <= limit);
  const top = shown[shown.length - 1];
  const pad = 0.06 * (top - low || 1);
  return { range: [low - pad, top + pad], left: sorted.length - shown.length };
}

function leftOut(chapter, count) {
  if (!count) return "";
  const said = count === 1 ? `1 ${chapter.noun} lies` : `${count} ${chapter.noun}s lie`;
  return `${said} above the frame; double-click the plot to see everything.`;
}

/* A logarithmic axis with ticks that say 0.002 or 1e-4, not powers in small print. */
function logAxis(values) {
  const given = values.filter((value) => value > 0);
  const [low, high] = [Math.min(...given), Math.max(...given)];
  const decades = Array.from(
    { length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 },
    (_, place) => Math.floor(Math.log10(low)) + place
  );
  const ticks = (factors) =>
    decades.flatMap((decade) => factors.map((factor) => Number(`${factor}e${decade}`)))
      .filter((tick) => tick >= low * 0.9 && tick <= high * 1.1);
  const fine = ticks([1, 2, 5]);
  const tickvals = fine.length > 9 ? ticks([1]) : fine;
  return { type: "log", tickvals, ticktext: tickvals.map((tick) => tickText(tick)) };
}

function tickText(tick) {
  if (tick >= 1000) return ["", "k", "M", "G", "T"].map((unit, power) => [tick / 1000 ** power, unit])
    .filter(([size]) => size >= 1).map(([size, unit]) => `${Number(size.toPrecision(3))}${unit}`).pop();
  return tick < 0.001 ? tick.toExponential() : String(tick);
}

function epochAxis(look, epochs) {
  return axis(look, "epoch", { range: [1 - 0.03 * epochs, epochs * 1.03], ...(epochs <= 12 ? { dtick: 1 } : {}) });
}

function steps(count) {
  return Array.from({ length: count }, (_, index) => index + 1);
}

/* Spread equal values a little, the same way each time. */
function jitter(index) {
  return ((index * 0.618034) % 1) - 0.5;
}

const LOSSES = [["test", "test loss x100"], ["validation", "validation loss x100"]];

const PLOTS = {};

PLOTS.losses = {
  controls: () => [{ name: "of", label: "Loss", options: [["validation", "validation"], ["train", "training"]] }],
  draw(chapter, values, look) {
    const traces = [];
    const focus = [];
    for (const gate of look.gates) {
      const found = chapter.losses[gate];
      const { low, high } = found[values.of];
      traces.push(...band(look, gate, steps(low.length), low, high));
      found.runs.forEach((run, place) => {
        const y = run[values.of];
        const best = place === 0;
        traces.push({
          x: steps(y.length),
          y,
          mode: best ? "lines+markers" : "lines",
          line: line(look, gate, best ? {} : { width: 0.9 }),
          opacity: best ? 1 : 0.55,
          marker: marker(look, gate, 5, { maxdisplayed: 8 }),
          hovertemplate: `${asText(gate)}, ${chapter.noun} ${run.index}<br>epoch %{x}: %{y:.4~g}<extra></extra>`,
        });
        if (!best) return;
        focus.push({ last: Math.min(...y), early: y[Math.ceil(y.length / 3) - 1], first: y[0], epochs: y.length });
        traces.push({ x: [run.best_epoch], y: [y[run.best_epoch - 1]], mode: "markers", marker: marker(look, gate, 11), ...FLAT });
      });
    }
    const floor = Math.min(...focus.map((curve) => curve.last));
    const ceiling = Math.max(
      ...focus.map((curve) => curve.early), floor + 4 * (Math.max(...focus.map((curve) => curve.last)) - floor)
    );
    const cut = focus.some((curve) => curve.first > ceiling * 1.02);
    const pad = 0.06 * (ceiling - floor || 1);
    const range = cut ? [floor - pad, ceiling + pad] : undefined;
    return {
      traces,
      layout: frame(
        look, epochAxis(look, Math.max(...focus.map((curve) => curve.epochs))), axis(look, `${values.of} loss x100`, { range })
      ),
      note: cut ? "The first epochs lie above the frame; double-click the plot to see everything." : "",
    };
  },
};

PLOTS.bootstrap = {
  controls: () => [],
  draw(chapter, values, look) {
    const traces = look.gates.flatMap((gate) => {
      const { trials, mean, low, high } = chapter.bootstrap[gate];
      return [
        ...band(look, gate, trials, low, high),
        {
          x: trials,
          y: mean,
          customdata: low.map((value, index) => [value, high[index]]),
          mode: "lines+markers",
          line: line(look, gate),
          marker: marker(look, gate, 6, { maxdisplayed: 12 }),
          hovertemplate:
            `${asText(gate)}, best of %{x} trials: %{y:.5~g}<br>` +
            "band %{customdata[0]:.5~g} to %{customdata[1]:.5~g}<extra></extra>",
        },
      ];
    });
    return {
      traces,
      layout: frame(
        look,
        axis(look, "trials", logAxis(look.gates.flatMap((gate) => chapter.bootstrap[gate].trials))),
        axis(look, "test loss x100")
      ),
    };
  },
};

function cost(column, title, unit, ticks) {
  return {
    controls: () => [],
    draw(chapter, values, look) {
      const { range, left } = crowd(look.gates.flatMap((gate) => chapter.trials[gate].test));
      const xs = look.gates.flatMap((gate) => chapter.trials[gate][column]).filter((value) => value !== null);
      const wide = Math.max(...xs) > 8 * Math.min(...xs);
      const traces = look.gates.map((gate) => {
        const trials = chapter.trials[gate];
        return {
          x: trials[column],
          y: trials.test,
          customdata: trials.index,
          mode: "markers",
          marker: marker(look, gate, 8, { opacity: trials.test.length > 60 ? 0.55 : 0.85 }),
          hovertemplate: `${asText(gate)}, ${chapter.noun} %{customdata}<br>%{x:.4~s} ${unit}<br>test loss %{y:.5~g}<extra></extra>`,
        };
      });
      const x = axis(look, title, wide ? logAxis(xs) : { tickformat: ticks });
      return { traces, layout: frame(look, x, axis(look, "test loss x100", { range })), note: leftOut(chapter, left) };
    },
  };
}

PLOTS.experts = cost("experts", "experts per sample", "experts", "~g");
PLOTS.flops = cost("flops", "FLOPs per sample", "FLOPs", "~s");

PLOTS.usage = {
  controls: () => [
    { name: "of", label: "Show", options: [["samples", "share of samples"], ["weight", "share of weight"]] },
  ],
  draw(chapter, values, look) {
    const rows = look.gates.flatMap((gate, place) => [
      ...(place && chapter.tasks.length > 1 ? [null] : []),
      ...Object.entries(chapter.best[gate].usage).map(([task, usage]) => ({ gate, task, shares: usage[values.of] })),
    ]);
    const count = Math.max(...rows.filter(Boolean).map((row) => row.shares.length));
    const figures = count <= 16 && look.width > 640;
    const inCell = (share) => (share === 0 ? "\u00d7" : figures && share >= 0.005 ? Math.round(100 * share) : "");
    const named = (row) => `<b>${asText(row.gate)}</b>${chapter.tasks.length > 1 ? `  ${asText(row.task)}` : ""}`;
    const padded = (row, cell) => Array.from({ length: count }, (_, at) => (row && at < row.shares.length ? cell(row.shares[at]) : null));
    return {
      traces: [
        {
          type: "heatmap",
          z: rows.map((row) => padded(row, (share) => share)),
          text: rows.map((row) => padded(row, (share) => (count <= 64 ? inCell(share) : "")).map((text) => text ?? "")),
          texttemplate: "%{text}",
          textfont: { size: 11 },
          customdata: rows.map((row) => padded(row, percent)),
          hovertext: rows.map((row) => padded(row, () => named(row))),
          hovertemplate: "%{hovertext}<br>expert %{x}: %{customdata}<extra></extra>",
          hoverongaps: false,
          zmin: 0,
          zmax: Math.max(...rows.filter(Boolean).flatMap((row) => row.shares)),
          colorscale: look.theme.heat,
          xgap: count > 64 ? 0 : 2,
          ygap: count > 64 ? 1 : 2,
          showscale: look.width > 640,
          colorbar: { thickness: 10, outlinewidth: 0, tickformat: ".0%", len: 1, tickfont: { color: look.theme.muted } },
        },
      ],
      layout: frame(
        look,
        axis(look, "expert", { showgrid: false, dtick: count > 32 ? undefined : look.width > 640 ? 1 : Math.ceil(count / 8), tickangle: 0 }),
        axis(look, "", {
          showgrid: false,
          autorange: "reversed",
          tickvals: rows.map((row, index) => (row ? index : null)).filter((index) => index !== null),
          ticktext: rows.filter(Boolean).map(named),
        }),
        { height: 70 + rows.length * (look.width < 500 ? 22 : 26) }
      ),
    };
  },
};

const MEASURES = {
  one_hot: "share of one-hot paths",
  entropy: "entropy of the trees",
  experts: "experts per sample",
};

PLOTS.convergence = {
  controls: () => [{ name: "of", label: "Show", options: Object.entries(MEASURES) }],
  draw(chapter, values, look) {
    const traces = [];
    let last = 1;
    for (const gate of look.gates) {
      const tasks = Object.values(chapter.best[gate].convergence).map((task) => task[values.of]);
      const epochs = steps(tasks[0].length);
      last = Math.max(last, epochs.length);
      const across = (pick) => epochs.map((_, index) => pick(tasks.map((task) => task[index])));
      if (tasks.length > 1) traces.push(...band(look, gate, epochs, across((v) => Math.min(...v)), across((v) => Math.max(...v))));
      traces.push({
        x: epochs,
        y: across((shares) => shares.reduce((sum, share) => sum + share, 0) / shares.length),
        mode: "lines+markers",
        line: line(look, gate),
        marker: marker(look, gate, 6, { maxdisplayed: 15 }),
        hovertemplate: `${asText(gate)}<br>epoch %{x}: %{y:.3~g}<extra></extra>`,
      });
    }
    const y = values.of === "one_hot"
      ? { range: [-0.03, 1.03], tickformat: ".0%" }
      : { rangemode: "tozero" };
    return { traces, layout: frame(look, epochAxis(look, last), axis(look, MEASURES[values.of], y)) };
  },
};

function matrixOf(size, entries) {
  const rows = Array.from({ length: size }, () => Array(size).fill(0));
  for (let at = 0; at < entries.length; at += 2) {
    rows[Math.floor(entries[at] / size)][entries[at] % size] = entries[at + 1] / 1000;
  }
  return rows;
}

PLOTS.permutation = {
  controls(chapter, values) {
    const gates = chapter.gates.filter((gate) => chapter.best[gate]?.permutation);
    const gate = gates.includes(values.gate) ? values.gate : gates[gates.length - 1];
    const { searches, frames } = chapter.best[gate].permutation;
    return [
      { name: "gate", label: "Gate", options: gates.map((name) => [name, name]), value: gate },
      { name: "search", label: "Permutation", options: searches.map((name, index) => [String(index), name]), hidden: searches.length < 2 },
      {
        name: "frame",
        label: "Epoch",
        count: frames.length,
        said: (place) => `${frames[place].epoch} (${frames[place].soft ? "soft" : "hard"})`,
      },
    ];
  },
  draw(chapter, values, look) {
    const { size, frames } = chapter.best[values.gate].permutation;
    const shown = frames[values.frame];
    const { matrix, order } = shown.searches[Number(values.search)];
    const z = matrix ? matrixOf(size, matrix) : order.map((expert) => order.map((_, other) => (other === expert ? 1 : 0)));
    const side = Math.min(look.width, 480);
    const ticks = { showgrid: false, dtick: size <= 16 ? 1 : size <= 32 ? 2 : undefined, constrain: "domain", tickangle: 0 };
    return {
      traces: [
        {
          type: "heatmap",
          z,
          zmin: 0,
          zmax: 1,
          colorscale: look.theme.heat,
          xgap: size > 64 ? 0 : 1,
          ygap: size > 64 ? 0 : 1,
          showscale: false,
          hovertemplate: "gate output %{y} to expert %{x}: %{z:.3f}<extra></extra>",
        },
      ],
      layout: frame(
        look,
        axis(look, "expert", ticks),
        axis(look, "output of the gate", { ...ticks, autorange: "reversed", scaleanchor: "x" }),
        { height: side }
      ),
      order: { title: shown.soft ? "Order that evaluation uses now" : "Order that stays", experts: order },
    };
  },
};

PLOTS.sensitivity = {
  controls: (chapter) => [
    { name: "parameter", label: "Setting", options: chapter.parameters.map(({ name }) => [name, name]) },
    { name: "of", label: "Loss", options: LOSSES },
  ],
  draw(chapter, values, look) {
    const { name, axis: kind, levels } = chapter.parameters.find((parameter) => parameter.name === values.parameter);
    const gates = look.gates.filter((gate) => name in chapter.trials[gate].params);
    const { range, left } = crowd(gates.flatMap((gate) => chapter.trials[gate][values.of]));
    const traces = gates.map((gate, place) => {
      const trials = chapter.trials[gate];
      const given = trials.params[name];
      const slot = gates.length > 1 ? (place + 0.5) / gates.length - 0.5 : 0;
      const spread = (index) => 0.75 * (slot + (0.6 * jitter(index)) / gates.length);
      return {
        x: levels ? given.map((value, index) => levels.indexOf(value) + spread(index)) : given,
        y: trials[values.of],
        customdata: trials.index.map((index, at) => [index, asText(given[at])]),
        mode: "markers",
        marker: marker(look, gate, 7, { opacity: trials.test.length > 60 ? 0.55 : 0.85 }),
        hovertemplate: `${asText(gate)}, ${chapter.noun} %{customdata[0]}<br>%{customdata[1]}: %{y:.5~g}<extra></extra>`,
      };
    });
    const x = levels
      ? { tickvals: levels.map((_, index) => index), ticktext: levels.map(asText), range: [-0.6, levels.length - 0.4], showgrid: false }
      : kind === "log" ? logAxis(gates.flatMap((gate) => chapter.trials[gate].params[name])) : {};
    return {
      traces,
      layout: frame(look, axis(look, asText(name), x), axis(look, LOSSES.find(([of]) => of === values.of)[1], { range })),
      note: leftOut(chapter, left),
    };
  },
};

PLOTS.spread = {
  controls: () => [],
  draw(chapter, values, look) {
    const { gates } = look;
    const { range, left } = crowd(gates.flatMap((gate) => chapter.trials[gate].test));
    const traces = gates.flatMap((gate, place) => {
      const { test, index } = chapter.trials[gate];
      const { mean, error, said } = chapter.spread[gate];
      const color = look.theme.gate(gate);
      return [
        {
          x: test.map((_, at) => place + 0.36 * jitter(at)),
          y: test,
          customdata: index,
          mode: "markers",
          marker: marker(look, gate, 8, { opacity: 0.8 }),
          hovertemplate: `${asText(gate)}, ${chapter.noun} %{customdata}<br>test loss %{y:.5~g}<extra></extra>`,
        },
        {
          x: [place + 0.32],
          y: [mean],
          error_y: { type: "data", array: [error ?? 0], thickness: 2, width: 6, color: look.theme.ink },
          mode: "markers",
          marker: { symbol: "line-ew-open", size: 16, color, line: { width: 3, color: look.theme.ink } },
          hovertemplate: `${asText(gate)}<br>${asText(said)}<extra></extra>`,
        },
      ];
    });
    const x = { tickvals: gates.map((_, place) => place), ticktext: gates.map(asText), range: [-0.5, gates.length - 0.4], showgrid: false };
    return { traces, layout: frame(look, axis(look, "", x), axis(look, "test loss x100", { range })), note: leftOut(chapter, left) };
  },
};
