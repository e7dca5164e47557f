/* What experts specialise in: a table of groups by experts with the lift of each pair, coloured by it. */

HTML_PLOTS.groups = {
  controls(section, values) {
    const gates = section.gates.filter((gate) => section.routing[gate]?.groups);
    const gate = gates.includes(values.gate) ? values.gate : gates[gates.length - 1];
    const owners = Object.keys(section.routing[gate].groups);
    const owner = owners.includes(values.owner) ? values.owner : owners[0];
    const names = Object.keys(section.routing[gate].groups[owner]);
    const select = (name, label, options, value) => ({ name, label, options: options.map((text) => [text, text]), value });
    return [
      select("gate", "Gate", gates, gate),
      { ...select("owner", "Gate of", owners, owner), isHidden: owners.length < 2 },
      select("column", "Samples by", names, names.includes(values.column) ? values.column : names[names.length - 1]),
    ];
  },
  draw(section, values, canvas) {
    const { labels, samples, lift, gain } = section.routing[values.gate].groups[values.owner][values.column];
    const theme = currentTheme();
    const experts = lift[0].flatMap((value, expert) => (value === null ? [] : [expert]));
    const unused = lift[0].length - experts.length;
    const names = ["samples", ...(gain.length ? ["routing gain"] : []), ...experts];
    const head = names.map((name) => `<th scope="col">${name}</th>`).join("");
    const rows = labels.map((label, group) => {
      const cells = experts.map((expert) => liftCell(lift[group][expert], theme)).join("");
      return `<tr><th scope="row">${escapeText(label)}</th><td>${samples[group].toLocaleString("en")}</td>${gainCell(gain[group])}${cells}</tr>`;
    });
    canvas.innerHTML =
      `<div class="scroll" role="region" tabindex="0" aria-label="Lift of each expert for each group"><table>` +
      `<thead><tr><td></td><td></td>${gain.length ? "<td></td>" : ""}<th scope="colgroup" class="text" colspan="${experts.length}">expert</th></tr>` +
      `<tr><th scope="col">${escapeText(values.column)}</th>${head}</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
    if (!unused) return { note: "" };
    return { note: unused === 1 ? "1 expert, which no sample uses, is left out." : `${unused} experts, which no sample uses, are left out.` };
  },
};

/* The rise of the test loss of a group when samples exchange their routes; no cell where it was not measured. */
function gainCell(gain) {
  if (gain === undefined) return "";
  return `<td>${gain === null ? "-" : (gain > 0 ? "+" : "") + Number(gain.toPrecision(3))}</td>`;
}

function liftCell(lift, theme) {
  const log = logRatio(lift);
  const color = withAlpha(log > 0 ? theme.above : theme.below, (RATIO_OPACITY * Math.abs(log)) / LARGEST_LOG_RATIO);
  return `<td style="background:${color}">${formatRatio(lift)}</td>`;
}
