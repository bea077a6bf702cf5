for (const section of document.querySelectorAll("section.tokens")) {
  section.classList.add("live");
  for (const hidden of section.querySelectorAll(".pick")) hidden.hidden = false;
  const range = section.querySelector("input"), output = section.querySelector("output");
  const layers = range.dataset.layers.split(","), buttons = section.querySelectorAll("button");
  const texts = [...section.querySelectorAll(".text")].map((text) => ({
    spans: [...text.children], experts: JSON.parse(text.dataset.experts) }));
  const unit = section.dataset.unit;
  let only = null;
  const draw = () => {
    const layer = layers[range.value];
    output.textContent = layer;
    range.setAttribute("aria-valuetext", "layer " + layer);
    for (const { spans, experts } of texts) spans.forEach((span, i) => {
      const petal = (experts[layer] || [])[i];
      span.className = "p" + petal + (only !== null && petal !== only ? " off" : "");
      span.title = unit + " " + petal + ", layer " + layer;
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
addEventListener("beforeprint", () => {
  for (const run of document.querySelectorAll("details")) run.open = true;
});
const opened = () => {
  const run = location.hash && document.getElementById(location.hash.slice(1));
  if (run) { run.open = true; run.scrollIntoView(); }
};
addEventListener("hashchange", opened);
opened();
