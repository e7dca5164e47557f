/* Plots of losses: by epoch, by number of trials, by cost, by hyperparameter, by gate. */

const LOSSES = { test: "test loss x100", validation: "validation loss x100", train: "training loss x100" };

function lossControl(...names) {
  return { name: "loss", label: "Loss", options: names.map((name) => [name, LOSSES[name]]) };
}

PLOTS.losses = {
  controls: () => [lossControl("validation", "train")],
  draw(section, values, view) {
    const traces = [];
    const bestCurves = [];
    for (const gate of view.gates) {
      const { runs, [values.loss]: { low, high } } = section.losses[gate];
      traces.push(...band(view, gate, epochNumbers(low.length), low, high));
      runs.forEach((run, rank) => {
        const losses = run[values.loss];
        const isBest = rank === 0;
        traces.push({
          x: epochNumbers(losses.length),
          y: losses,
          mode: isBest ? "lines+markers" : "lines",
          line: line(view, gate, isBest ? {} : { width: 0.9 }),
          opacity: isBest ? 1 : 0.55,
          marker: marker(view, gate, 5, { maxdisplayed: 8 }),
          hovertemplate: `${escapeText(gate)}, ${section.noun} ${run.index}<br>epoch %{x}: %{y:.4~g}<extra></extra>`,
        });
        if (!isBest) return;
        bestCurves.push(losses);
        traces.push({
          x: [run.best_epoch], y: [losses[run.best_epoch - 1]], mode: "markers", marker: marker(view, gate, 11), ...NO_HOVER,
        });
      });
    }
    const range = rangeWithoutFirstEpochs(bestCurves);
    const epochs = Math.max(...bestCurves.map((losses) => losses.length));
    return {
      traces,
      layout: makeLayout(view, epochAxis(view, epochs), axis(view, LOSSES[values.loss], { range })),
      note: range ? "The first epochs are above the visible range; double-click the plot to see all points." : "",
    };
  },
};

/* Losses fall fast at first: the range shows the curves from about a third of the epochs on. */
function rangeWithoutFirstEpochs(curves) {
  const known = curves.map(withoutNull).filter((losses) => losses.length);
  const lowest = known.map((losses) => Math.min(...losses));
  const floor = Math.min(...lowest);
  const ceiling = Math.max(
    ...known.map((losses) => Math.max(...losses.slice(Math.ceil(losses.length / 3) - 1))), floor + 4 * (Math.max(...lowest) - floor)
  );
  if (!known.some(([first]) => first > ceiling * 1.02)) return undefined;
  const padding = 0.06 * (ceiling - floor || 1);
  return [floor - padding, ceiling + padding];
}

PLOTS.tuning = {
  controls: () => [],
  draw(section, values, view) {
    const traces = view.gates.flatMap((gate) => {
      const { trials, mean, low, high } = section.tuning[gate];
      return [
        ...band(view, gate, trials, low, high),
        {
          x: trials,
          y: mean,
          customdata: low.map((value, index) => [value, high[index]]),
          mode: "lines+markers",
          line: line(view, gate),
          marker: marker(view, gate, 6, { maxdisplayed: 12 }),
          hovertemplate:
            `${escapeText(gate)}, best of %{x} trials: %{y:.5~g}<br>` +
            "band %{customdata[0]:.5~g} to %{customdata[1]:.5~g}<extra></extra>",
        },
      ];
    });
    const trials = view.gates.flatMap((gate) => section.tuning[gate].trials);
    return {
      traces,
      layout: makeLayout(view, axis(view, "number of trials", logAxis(trials)), axis(view, LOSSES.test)),
    };
  },
};

function costPlot(column, title, unit, tickformat) {
  return {
    controls: () => [],
    draw(section, values, view) {
      const { range, outliers } = rangeWithoutOutliers(view.gates.flatMap((gate) => section.trials[gate].test));
      const costs = withoutNull(view.gates.flatMap((gate) => section.trials[gate][column]));
      const isWide = Math.max(...costs) > 8 * Math.min(...costs);
      const traces = view.gates.map((gate) => {
        const trials = section.trials[gate];
        return {
          x: trials[column],
          y: trials.test,
          customdata: trials.index,
          mode: "markers",
          marker: marker(view, gate, 8, { opacity: pointOpacity(trials.test.length) }),
          hovertemplate:
            `${escapeText(gate)}, ${section.noun} %{customdata}<br>%{x:.4~s} ${unit}<br>` +
            "test loss %{y:.5~g}<extra></extra>",
        };
      });
      const xaxis = axis(view, title, isWide ? logAxis(costs) : { tickformat });
      return {
        traces,
        layout: makeLayout(view, xaxis, axis(view, LOSSES.test, { range })),
        note: outlierNote(section, outliers),
      };
    },
  };
}

PLOTS.experts = costPlot("experts", "experts per sample", "experts", "~g");
PLOTS.flops = costPlot("flops", "FLOPs per sample", "FLOPs", "~s");

PLOTS.sensitivity = {
  controls: (section) => [
    { name: "parameter", label: "Hyperparameter", options: section.parameters.map(({ name }) => [name, name]) },
    lossControl("test", "validation"),
  ],
  draw(section, values, view) {
    const { name, axis: scale, choices } = section.parameters.find(({ name }) => name === values.parameter);
    const gates = view.gates.filter((gate) => name in section.trials[gate].params);
    const { range, outliers } = rangeWithoutOutliers(gates.flatMap((gate) => section.trials[gate][values.loss]));
    const traces = gates.map((gate, gateIndex) => {
      const trials = section.trials[gate];
      const given = trials.params[name];
      const slot = (gateIndex + 0.5) / gates.length - 0.5;
      const offset = (index) => 0.75 * (slot + (0.6 * jitter(index)) / gates.length);
      return {
        x: choices ? given.map((value, index) => choices.indexOf(value) + offset(index)) : given,
        y: trials[values.loss],
        customdata: trials.index.map((trial, index) => [trial, escapeText(given[index])]),
        mode: "markers",
        marker: marker(view, gate, 7, { opacity: pointOpacity(trials.test.length) }),
        hovertemplate: `${escapeText(gate)}, ${section.noun} %{customdata[0]}<br>%{customdata[1]}: %{y:.5~g}<extra></extra>`,
      };
    });
    const log = () => logAxis(gates.flatMap((gate) => section.trials[gate].params[name]));
    const xaxis = choices ? categoryAxis(choices, [-0.6, choices.length - 0.4]) : scale === "log" ? log() : {};
    return {
      traces,
      layout: makeLayout(view, axis(view, escapeText(name), xaxis), axis(view, LOSSES[values.loss], { range })),
      note: outlierNote(section, outliers),
    };
  },
};

const COSTS = { operations: "operations per sample", time: "seconds to predict a row" };

/* Loss by cost: the dense networks as a line with its band, each network a point with its standard error. */
PLOTS.frontier = {
  controls: (section) => [
    { name: "cost", label: "Cost", options: Object.entries(COSTS), isHidden: !section.frontier.hasTimes },
  ],
  draw(section, values, view) {
    const { points, line: dense, trees } = section.frontier;
    const costs = view.gates.map((gate) => points[gate][values.cost]);
    const ends = [Math.min(...costs) / 1.3, Math.max(...costs) * 1.3];
    const onLine = dense.map((gate) => points[gate]).sort((a, b) => a[values.cost] - b[values.cost]);
    const x = onLine.map((point) => point[values.cost]);
    const edge = (sign) => onLine.map(({ loss, error }) => loss + sign * (error ?? 0));
    const places = labelPlaces(view.gates.map((gate) => points[gate]), values.cost, view.width);
    const traces = [
      ...band(view, "dense", x, edge(-1), edge(1)),
      { x, y: onLine.map(({ loss }) => loss), mode: "lines", line: line(view, "dense"), ...NO_HOVER },
      ...view.gates.map((gate, index) => {
        const { [values.cost]: cost, loss, error } = points[gate];
        return {
          x: [cost],
          y: [loss],
          error_y: { type: "data", array: [error ?? 0], color: view.theme.gate(gate), thickness: 1.6, width: 4 },
          text: [escapeText(gate)],
          textposition: places[index],
          textfont: { color: view.theme.gate(gate) },
          mode: "markers+text",
          marker: marker(view, gate, 9),
          hovertemplate: `${escapeText(gate)}<br>%{x:.4~s} ${COSTS[values.cost]}<br>test loss %{y:.5~g}<extra></extra>`,
        };
      }),
    ];
    const { range: losses, outside } = lossRange(view.gates.map((gate) => points[gate]), trees);
    if (trees !== null && !outside) {
      traces.push({
        x: ends,
        y: [trees, trees],
        mode: "lines+text",
        text: ["boosted trees", ""],
        textposition: "top right",
        textfont: { color: view.theme.muted },
        line: { color: view.theme.muted, dash: "dot", width: 1.6 },
        hovertemplate: "boosted trees<br>test loss %{y:.5~g}<extra></extra>",
      });
    }
    const range = ends.map(Math.log10);
    return {
      traces,
      layout: makeLayout(
        view, axis(view, COSTS[values.cost], { ...logAxis(ends), range }), axis(view, LOSSES.test, { range: losses })
      ),
      note: outside ? `Boosted trees have ${trees}, ${outside} the visible range.` : "",
    };
  },
};

/* The losses of the networks with their errors, and of boosted trees unless they are farther away than the networks
   are from each other. */
function lossRange(points, trees) {
  const ends = points.flatMap(({ loss, error }) => [loss - (error ?? 0), loss + (error ?? 0)]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const spread = high - low || 1;
  const isFar = trees !== null && (trees < low - spread || trees > high + spread);
  const shown = trees === null || isFar ? [low, high] : [Math.min(low, trees), Math.max(high, trees)];
  const padding = 0.08 * (shown[1] - shown[0] || 1);
  return { range: [shown[0] - padding, shown[1] + padding], outside: !isFar ? "" : trees < low ? "below" : "above" };
}

/* Where each name stands: on the side of its point with the fewest other points near it. */
function labelPlaces(points, cost, width) {
  const spread = (numbers) => Math.max(...numbers) - Math.min(...numbers) || 1;
  const [xs, ys] = [points.map((point) => Math.log(point[cost])), points.map(({ loss }) => loss)];
  const [across, up] = [(spread(xs) * 90) / width, spread(ys) / 8];
  const sides = {
    "middle right": [1, 0], "middle left": [-1, 0], "top center": [0, 1], "bottom center": [0, -1],
    "top right": [1, 1], "bottom right": [1, -1], "top left": [-1, 1], "bottom left": [-1, -1],
  };
  const taken = [];
  return xs.map((x, index) => {
    const crowding = ([right, above]) => {
      const [toX, toY] = [x + right * across, ys[index] + 0.6 * above * up];
      const near = (otherX, otherY, size) =>
        Math.max(0, size - Math.abs(otherX - toX) / across) * Math.max(0, 1 - Math.abs(otherY - toY) / up);
      return xs.reduce((sum, other, number) => sum + (number === index ? 0 : near(other, ys[number], 1.2)), 0) +
        taken.reduce((sum, [otherX, otherY]) => sum + near(otherX, otherY, 1.8), 0) +
        (toX > Math.max(...xs) + 0.5 * across ? 0.3 : 0);
    };
    const names = Object.keys(sides);
    const costs = names.map((name) => crowding(sides[name]));
    const best = names[costs.indexOf(Math.min(...costs))];
    taken.push([x + sides[best][0] * across, ys[index] + 0.6 * sides[best][1] * up]);
    return best;
  });
}

PLOTS.seeds = {
  controls: () => [],
  draw(section, values, view) {
    const { gates } = view;
    const { range, outliers } = rangeWithoutOutliers(gates.flatMap((gate) => section.trials[gate].test));
    const traces = gates.flatMap((gate, gateIndex) => {
      const { test, index: indices } = section.trials[gate];
      const { mean, error, text } = section.means[gate];
      return [
        {
          x: test.map((_, index) => gateIndex + 0.36 * jitter(index)),
          y: test,
          customdata: indices,
          mode: "markers",
          marker: marker(view, gate, 8, { opacity: 0.8 }),
          hovertemplate: `${escapeText(gate)}, ${section.noun} %{customdata}<br>test loss %{y:.5~g}<extra></extra>`,
        },
        {
          x: [gateIndex + 0.32],
          y: [mean],
          error_y: { type: "data", array: [error ?? 0], thickness: 2, width: 6, color: view.theme.ink },
          mode: "markers",
          marker: { symbol: "line-ew-open", size: 16, color: view.theme.gate(gate), line: { width: 3, color: view.theme.ink } },
          hovertemplate: `${escapeText(gate)}<br>${escapeText(text)}<extra></extra>`,
        },
      ];
    });
    return {
      traces,
      layout: makeLayout(
        view, axis(view, "", categoryAxis(gates, [-0.5, gates.length - 0.4])), axis(view, LOSSES.test, { range })
      ),
      note: outlierNote(section, outliers),
    };
  },
};

function categoryAxis(names, range) {
  return { tickvals: names.map((_, index) => index), ticktext: names.map(escapeText), range, showgrid: false };
}
