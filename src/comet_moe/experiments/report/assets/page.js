/* The page: figures with their controls, legends and tables that sort. A figure is drawn when it scrolls into view;
   printing draws all of them. Plotly is 5 MB of code, which a browser reads for a second: it stands in the page as text
   and is run for the first plot, after the text and the tables have been painted. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const PRINT_WIDTH = 680;
const MAX_LISTED_EXPERTS = 64;
const hiddenGates = DATA.sections.map(() => new Set());
let isPrinting = false;

function loadPlotly() {
  if (globalThis.Plotly) return;
  const script = document.createElement("script");
  script.textContent = document.getElementById("plotly").textContent;
  document.head.append(script);
}

class Figure {
  constructor(element) {
    this.element = element;
    this.kind = element.dataset.plot;
    this.sectionIndex = Number(element.dataset.section);
    this.section = DATA.sections[this.sectionIndex];
    this.canvas = element.querySelector(".canvas");
    this.controls = element.querySelector(".controls");
    this.note = element.querySelector(".note");
    this.order = element.querySelector(".order");
    this.hasLegend = element.dataset.legend !== undefined;
    this.gates = JSON.parse(element.dataset.gates);
    this.isHtml = Object.hasOwn(HTML_PLOTS, this.kind);
    this.plot = (this.isHtml ? HTML_PLOTS : PLOTS)[this.kind];
    this.values = {};
    this.isDrawn = false;
    this.updateControls();
    element.querySelector(".save")?.addEventListener("click", () => this.save());
  }

  /* Controls depend on each other (each gate has its own epochs): a value is kept if it is still an option. */
  updateControls() {
    for (const control of this.plot.controls(this.section, this.values)) {
      const isSlider = control.count !== undefined;
      const label = this.controls.querySelector(`[data-name="${control.name}"]`) ?? this.addControl(control, isSlider);
      if (isSlider) this.updateSlider(label, control);
      else this.updateSelect(label.querySelector("select"), control);
      label.hidden = Boolean(control.isHidden) || control.count === 1;
    }
  }

  addControl({ name, label: text }, isSlider) {
    const label = document.createElement("label");
    label.dataset.name = name;
    const input = document.createElement(isSlider ? "input" : "select");
    if (isSlider) Object.assign(input, { type: "range", min: 0, step: 1 });
    input.addEventListener("input", () => {
      this.values[name] = isSlider ? Number(input.value) : input.value;
      this.updateControls();
      this.draw();
    });
    label.append(text, " ", input);
    if (isSlider) label.append(document.createElement("output"));
    this.controls.append(label);
    return label;
  }

  updateSelect(select, { name, options, value }) {
    const names = options.map(([option]) => option);
    const selected = value ?? (names.includes(this.values[name]) ? this.values[name] : names[0]);
    if (select.dataset.names !== JSON.stringify(names)) {
      select.replaceChildren(...options.map(([option, text]) => new Option(text, option)));
      select.dataset.names = JSON.stringify(names);
    }
    select.value = selected;
    this.values[name] = selected;
  }

  updateSlider(label, { name, count, describe }) {
    const slider = label.querySelector("input");
    const isNew = this.values[name] === undefined || slider.max !== String(count - 1);
    const position = isNew ? count - 1 : this.values[name];
    slider.max = count - 1;
    slider.value = position;
    slider.setAttribute("aria-valuetext", describe(position));
    label.querySelector("output").textContent = describe(position);
    this.values[name] = position;
  }

  draw() {
    this.isDrawn = true;
    const width = isPrinting ? this.printWidth() : this.canvas.clientWidth;
    if (this.isHtml) {
      this.note.textContent = this.plot.draw(this.section, this.values, this.canvas, width).note;
      return;
    }
    const view = {
      theme: currentTheme(),
      width,
      isPrinting,
      gates: this.gates.filter((gate) => !this.hasLegend || !hiddenGates[this.sectionIndex].has(gate)),
      isTouch: matchMedia("(pointer: coarse)").matches,
    };
    const { traces, layout, note, order } = view.gates.length
      ? this.plot.draw(this.section, this.values, view)
      : { traces: [], layout: makeLayout(view, axis(view, ""), axis(view, "")), note: "All gates of this plot are hidden." };
    if (isPrinting) layout.width = width;
    loadPlotly();
    Plotly.react(this.canvas, traces, layout, { displayModeBar: false });
    this.note.textContent = note ?? "";
    if (order) this.listOrder(order);
  }

  listOrder({ title, experts }) {
    this.order.hidden = experts.length > MAX_LISTED_EXPERTS;
    this.order.querySelector("h4").textContent = title;
    this.order.querySelector("ol").replaceChildren(...experts.map((expert, output) => {
      const item = document.createElement("li");
      item.textContent = `${output} \u2192 ${expert}`;
      return item;
    }));
  }

  save() {
    if (!this.isDrawn) this.draw();
    Plotly.downloadImage(this.canvas, { format: "svg", filename: this.element.closest("section").id });
  }

  printWidth() {
    if (this.element.closest(".pair")) return PRINT_WIDTH / 2 - 14;
    return this.order ? 400 : PRINT_WIDTH;
  }
}

const figures = [...document.querySelectorAll("figure[data-plot]")].map((element) => new Figure(element));

/* A legend hides and shows a gate in every plot of the section that has a legend. */
function fillLegend(legend) {
  const sectionIndex = Number(legend.dataset.section);
  legend.replaceChildren(...JSON.parse(legend.dataset.gates).map((gate) => {
    const button = document.createElement("button");
    button.type = "button";
    button.innerHTML = `<span class="swatch">${swatch(gate)}</span>`;
    button.append(gate);
    button.dataset.gate = gate;
    button.setAttribute("aria-pressed", "true");
    button.title = `Show or hide ${gate}`;
    button.addEventListener("click", () => toggleGate(sectionIndex, gate));
    return button;
  }));
}

function toggleGate(sectionIndex, gate) {
  const hidden = hiddenGates[sectionIndex];
  if (!hidden.delete(gate)) hidden.add(gate);
  for (const button of document.querySelectorAll(`.legend[data-section="${sectionIndex}"] button`)) {
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.gate)));
  }
  for (const figure of figures) {
    if (figure.sectionIndex === sectionIndex && figure.hasLegend && figure.isDrawn) figure.draw();
  }
}

function redraw() {
  for (const figure of figures) if (figure.isDrawn) figure.draw();
}

function setPrinting(value) {
  if (value === isPrinting) return;
  isPrinting = value;
  if (isPrinting) document.documentElement.dataset.theme = "light";
  else delete document.documentElement.dataset.theme;
  for (const figure of figures) if (isPrinting || figure.isDrawn) figure.draw();
}

/* Sort by a column, in the other direction each time; cells without a value are last in both. */
function sortTable(header) {
  const table = header.closest("table");
  const column = [...header.parentElement.children].indexOf(header);
  const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const valueOf = (row) => row.children[column].dataset.value;
  const compare = (a, b) => {
    const [left, right] = [valueOf(a), valueOf(b)];
    if (left === "" || right === "") return (left === "") - (right === "");
    const [x, y] = [Number(left), Number(right)];
    return sign * (Number.isNaN(x) || Number.isNaN(y) ? left.localeCompare(right) : x - y);
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(compare));
}

for (const legend of document.querySelectorAll(".legend")) fillLegend(legend);
for (const element of document.querySelectorAll(".swatch[data-gate]")) element.innerHTML = swatch(element.dataset.gate);
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortTable(button.closest("th")));
}

const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter(({ isIntersecting }) => isIntersecting)) {
      observer.unobserve(entry.target);
      const figure = figures.find(({ element }) => element === entry.target);
      if (!figure.isDrawn) figure.draw();
    }
  },
  { rootMargin: "500px" }
);
/* In a task after the first frame: before it, the text would wait for the plots. */
requestAnimationFrame(() => setTimeout(() => {
  for (const figure of figures) observer.observe(figure.element);
  globalThis.requestIdleCallback?.(loadPlotly);  // while the reader reads the first lines
}));

addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
matchMedia("print").addEventListener("change", ({ matches }) => setPrinting(matches));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let windowWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === windowWidth || isPrinting) return;
  windowWidth = innerWidth;
  redraw();
});
