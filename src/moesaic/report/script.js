for (const section of document.querySelectorAll("section.tokens")) {
  section.classList.add("live");
  for (const hidden of section.querySelectorAll(".pick")) hidden.hidden = false;
  const range = section.querySelector("input"), output = section.querySelector("output");
  const layers = range.dataset.layers.split(","), buttons = section.querySelectorAll("button");
  const texts = [...section.querySelectorAll(".text")].map((text) => ({
    spans: [...text.children], experts: text.dataset.experts.split(" ") }));
  const digits = +section.dataset.digits, unit = section.dataset.unit;
  let only = null;
  const draw = () => {
    const layer = layers[range.value], at = range.value;
    output.textContent = layer;
    range.setAttribute("aria-valuetext", "layer " + layer);
    for (const { spans, experts } of texts) spans.forEach((span, i) => {
      const petal = parseInt(experts[at].substr(i * digits, digits), 36);
      span.className = "p" + petal + (only !== null && petal !== only ? " off" : "");
      span.title = (petal < section.dataset.petals ? unit + " " + petal : "no " + unit) + ", layer " + layer;
    });
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === only));
  };
  range.addEventListener("input", draw);
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    only = only === i ? null : i;
    draw();
  }));
  draw();
}
const gone = new Set();
for (const form of document.querySelectorAll("form.choice")) {
  form.hidden = false;
  const points = form.parentNode.querySelectorAll(".point[data-at]");
  const plots = [...form.parentNode.querySelectorAll(".plot")];
  const said = form.parentNode.querySelector(".said");
  const across = form.querySelectorAll("[name=saved]").length;
  form.draw = () => {
    const one = (name) => +form.querySelector(`[name=${name}]:checked`).value;
    const at = one("lost") * across + one("saved");
    const all = !form.comparisons || form.comparisons.checked;
    plots.forEach((plot, i) => { plot.style.display = i === at ? "" : "none"; });
    said.textContent = plots[at].querySelector("desc").textContent;
    for (const point of points) {
      const place = point.dataset.at.split(";")[at];
      const seen = place && !gone.has(point.dataset.run) &&
        (all || !point.classList.contains("comparison"));
      point.style.display = seen ? "" : "none";
      if (!place) continue;
      const [x, y, ahead] = place.split(",");
      point.setAttribute("transform", `translate(${x} ${y})`);
      point.classList.toggle("beaten", ahead === "0");
    }
  };
  form.addEventListener("change", form.draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.draw();
}
const hot = (run, on) => {
  for (const of of document.querySelectorAll(`.point[data-run="${run}"],tr[data-run="${run}"],.card[data-run="${run}"]`))
    of.classList.toggle("hot", on);
};
for (const of of document.querySelectorAll("[data-run]:not(details)")) {
  if (of.dataset.run === "0") continue;
  for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focusin", true],
    ["focusout", false]]) of.addEventListener(event, () => hot(of.dataset.run, on));
}
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, j) => {
    const cell = row.cells[j], said = cell.dataset.value ?? cell.textContent.trim();
    return said === "–" || said === "" ? null : isNaN(said) ? said : +said;
  };
  heads.forEach((head, j) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [key(row, j), row]);
      rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null)
        : typeof a === typeof b ? down * (a < b ? -1 : a > b ? 1 : 0)
        : typeof a === "number" ? -1 : 1);
      body.append(...rows.map(([, row]) => row));
    });
  });
}
for (const input of document.querySelectorAll(".find input")) {
  input.closest(".find").hidden = false;
  const rows = [...document.getElementById(input.dataset.table).tBodies[0].rows];
  const output = input.parentNode.querySelector("output");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of rows) {
      const said = row.dataset.words ?? row.textContent.toLowerCase();
      const kept = words.every((word) => said.includes(word));
      row.hidden = !kept;
      left += kept;
      if (!row.dataset.run) continue;
      for (const of of document.querySelectorAll(`details[data-run="${row.dataset.run}"],` +
        `.card[data-run="${row.dataset.run}"]`)) of.hidden = !kept;
      gone[kept ? "delete" : "add"](row.dataset.run);
    }
    output.textContent = words.length ? `${left} of ${rows.length}` : "";
    for (const form of document.querySelectorAll("form.choice")) form.draw();
  });
}
for (const fold of document.querySelectorAll(".folds")) {
  fold.hidden = false;
  for (const button of fold.querySelectorAll("button")) button.addEventListener("click", () => {
    for (const run of document.querySelectorAll("details.run")) run.open = !!button.dataset.open;
  });
}
addEventListener("beforeprint", () => {
  for (const run of document.querySelectorAll("details")) run.open = true;
});
const opened = () => {
  const run = location.hash && document.getElementById(location.hash.slice(1));
  if (!run) return;
  if (run.tagName === "DETAILS") {
    run.open = true;
    run.firstElementChild.focus({ preventScroll: true });
  }
  run.scrollIntoView();
};
addEventListener("hashchange", opened);
opened();
