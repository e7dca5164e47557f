/* The page comes to life: plots are drawn as they scroll into view, and all of them before printing. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const PRINT_WIDTH = 680;
const hiddenGates = DATA.chapters.map(() => new Set());
let printing = false;

class Figure {
  constructor(element) {
    this.element = element;
    this.kind = element.dataset.plot;
    this.place = Number(element.dataset.chapter);
    this.chapter = DATA.chapters[this.place];
    this.canvas = element.querySelector(".canvas");
    this.panel = element.querySelector(".controls");
    this.note = element.querySelector(".note");
    this.order = element.querySelector(".order");
    this.follows = element.dataset.follows !== undefined;
    this.gates = JSON.parse(element.dataset.gates);
    this.plot = this.kind === "trees" ? TREES : PLOTS[this.kind];
    this.values = {};
    this.drawn = false;
    this.syncControls();
    element.querySelector(".save")?.addEventListener("click", () => this.save());
  }

  /* Controls depend on each other (a gate has its own number of epochs): values are kept where they still fit. */
  syncControls() {
    for (const control of this.plot.controls(this.chapter, this.values)) {
      const label = this.panel.querySelector(`[data-name="${control.name}"]`) ?? this.addLabel(control);
      const input = label.querySelector("select, input");
      if (control.count === undefined) this.fillSelect(input, control);
      else this.fillRange(label, input, control);
      label.hidden = Boolean(control.hidden) || control.count === 1;
    }
  }

  addLabel(control) {
    const label = document.createElement("label");
    label.dataset.name = control.name;
    label.append(control.label, " ");
    const input = document.createElement(control.count === undefined ? "select" : "input");
    if (control.count !== undefined) {
      input.type = "range";
      input.min = 0;
      input.step = 1;
    }
    input.addEventListener("input", () => {
      this.values[control.name] = control.count === undefined ? input.value : Number(input.value);
      this.syncControls();
      this.draw();
    });
    label.append(input);
    if (control.count !== undefined) label.append(document.createElement("output"));
    this.panel.append(label);
    return label;
  }

  fillSelect(select, { name, options, value }) {
    const names = options.map(([option]) => option);
    const wanted = value ?? (names.includes(this.values[name]) ? this.values[name] : names[0]);
    if (select.dataset.names !== JSON.stringify(names)) {
      select.replaceChildren(...options.map(([option, text]) => new Option(text, option)));
      select.dataset.names = JSON.stringify(names);
    }
    select.value = wanted;
    this.values[name] = wanted;
  }

  fillRange(label, range, { name, count, said }) {
    const changed = range.max !== String(count - 1);
    range.max = count - 1;
    const place = this.values[name] === undefined || changed ? count - 1 : this.values[name];
    this.values[name] = place;
    range.value = place;
    range.setAttribute("aria-valuetext", said(place));
    label.querySelector("output").textContent = said(place);
  }

  draw() {
    this.drawn = true;
    const width = printing ? this.printWidth() : this.canvas.clientWidth;
    if (this.kind === "trees") {
      this.note.textContent = this.plot.draw(this.chapter, this.values, this.canvas, width).note;
      return;
    }
    const look = {
      theme: currentTheme(),
      width,
      printing,
      gates: this.gates.filter((gate) => !this.follows || !hiddenGates[this.place].has(gate)),
      touch: matchMedia("(pointer: coarse)").matches,
    };
    const { traces, layout, note, order } = look.gates.length
      ? this.plot.draw(this.chapter, this.values, look)
      : { traces: [], layout: frame(look, axis(look, ""), axis(look, "")), note: "Every gate of this plot is hidden." };
    if (printing) layout.width = width;
    Plotly.react(this.canvas, traces, layout, { displayModeBar: false });
    this.note.textContent = note ?? "";
    if (order) this.fillOrder(order);
  }

  fillOrder({ title, experts }) {
    this.order.hidden = experts.length > 64;
    this.order.querySelector("h4").textContent = title;
    this.order.querySelector("ol").replaceChildren(...experts.map((expert, output) => {
      const item = document.createElement("li");
      item.textContent = `${output} \u2192 ${expert}`;
      return item;
    }));
  }

  save() {
    if (!this.drawn) this.draw();
    Plotly.downloadImage(this.canvas, { format: "svg", filename: this.element.closest("section").id });
  }

  printWidth() {
    if (this.element.closest(".pair")) return PRINT_WIDTH / 2 - 14;
    return this.order ? 400 : PRINT_WIDTH;
  }
}

const figures = [...document.querySelectorAll("figure[data-plot]")].map((element) => new Figure(element));

/* Keys hide and show a gate in every plot of the chapter that has one. */
function fillKey(key) {
  const place = Number(key.dataset.chapter);
  key.replaceChildren(...JSON.parse(key.dataset.gates).map((gate) => {
    const button = document.createElement("button");
    button.type = "button";
    button.innerHTML = `<span class="swatch">${swatch(gate)}</span>`;
    button.append(gate);
    button.dataset.gate = gate;
    button.setAttribute("aria-pressed", "true");
    button.title = `Show or hide ${gate}`;
    button.addEventListener("click", () => toggleGate(place, gate));
    return button;
  }));
}

function toggleGate(place, gate) {
  const hidden = hiddenGates[place];
  if (!hidden.delete(gate)) hidden.add(gate);
  for (const button of document.querySelectorAll(`.key[data-chapter="${place}"] button`)) {
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.gate)));
  }
  for (const figure of figures) if (figure.place === place && figure.follows && figure.drawn) figure.draw();
}

function redraw() {
  for (const figure of figures) if (figure.drawn) figure.draw();
}

function setPrinting(starts) {
  if (starts === printing) return;
  printing = starts;
  if (starts) document.documentElement.dataset.theme = "light";
  else delete document.documentElement.dataset.theme;
  for (const figure of figures) if (starts || figure.drawn) figure.draw();
}

function sortTable(header) {
  const table = header.closest("table");
  const column = [...header.parentElement.children].indexOf(header);
  const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const keyOf = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
  const compare = (a, b) => {
    const [left, right] = [keyOf(a), keyOf(b)];
    if (left === "" || right === "") return (left === "") - (right === "");
    const [x, y] = [Number(left), Number(right)];
    return sign * (Number.isNaN(x) || Number.isNaN(y) ? left.localeCompare(right) : x - y);
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(compare));
}

for (const key of document.querySelectorAll(".key")) fillKey(key);
for (const place of document.querySelectorAll(".swatch[data-gate]")) place.innerHTML = swatch(place.dataset.gate);
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortTable(button.closest("th")));
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter(({ isIntersecting }) => isIntersecting)) {
      seen.unobserve(entry.target);
      const figure = figures.find(({ element }) => element === entry.target);
      if (!figure.drawn) figure.draw();
    }
  },
  { rootMargin: "500px" }
);
for (const figure of figures) seen.observe(figure.element);

addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
matchMedia("print").addEventListener("change", ({ matches }) => setPrinting(matches));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width || printing) return;
  width = innerWidth;
  redraw();
});
