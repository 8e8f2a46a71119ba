// Draws every panel of the page in its colours, and again when these or the choice of a figure change.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const chosen = {};
for (const group of document.querySelectorAll(".toggles")) {
  chosen[group.dataset.key] = group.firstElementChild.textContent;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// Figures name the page's own colours: "text" and "quiet".
function coloured(part) {
  if (Array.isArray(part)) return part.map(coloured);
  if (part === null || typeof part !== "object") return part;
  return Object.fromEntries(Object.entries(part).map(([key, value]) => [
    key,
    key === "color" && (value === "text" || value === "quiet") ? colour(value) : coloured(value),
  ]));
}

function draw(name) {
  const place = document.getElementById(name);
  const figure = figures[name].find(({ choice }) =>
    Object.keys(choice).every(key => choice[key] === chosen[key]));
  const traces = coloured(figure.data);
  for (const trace of traces) {
    if (trace.type === "heatmap") {
      // What is mostly zero starts from the page's own colour.
      const rare = trace.meta === "rare";
      trace.colorscale = rare
        ? [[0, colour("card")], [0.15, "hsl(30, 75%, 60%)"], [1, "hsl(178, 75%, 32%)"]]
        : [[0, "hsl(30, 70%, 50%)"], [0.5, "hsl(80, 40%, 45%)"], [1, "hsl(178, 75%, 32%)"]];
      trace.showscale = false;
      if (!rare) trace.textfont = { color: "#fff" };
    }
  }
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const layout = coloured(figure.layout);
  for (const key of Object.keys(layout).filter(key => /^[xy]axis/.test(key))) {
    const title = { text: layout[key].title || "", standoff: 8, font: { size: 13 } };
    layout[key] = { ...axis, ...layout[key], title };
  }
  const narrow = place.clientWidth < 520;
  Plotly.react(place, traces, {
    ...layout,
    font: { family: "system-ui, sans-serif", size: 13, color: colour("text") },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
    margin: { l: 8, r: 8, t: 12, b: 8 },
    modebar: { bgcolor: "transparent", color: colour("quiet"), activecolor: colour("text") },
    // A finger that scrolls the page must not zoom a figure.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    legend: { ...layout.legend, ...(figure.tall && !narrow ? {} : { orientation: "h", y: 1.02, yanchor: "bottom" }) },
    showlegend: traces.length > 1,
    colorway: ["#0b7285", "#e8590c", "#7048e8", "#2b8a3e", "#d6336c", "#1c7ed6", "#b08900", "#868e96", "#12b886", "#f03e3e"],
  }, {
    responsive: true,
    displaylogo: false,
    displayModeBar: narrow ? false : "hover",
    // Nothing of a report goes anywhere.
    showSendToCloud: false,
    plotlyServerURL: "",
    // The camera in a figure's corner saves it as it is now, for a paper.
    toImageButtonOptions: { format: "svg", filename: name },
  });
}

// One panel after another, so that the page can be read from the start.
function drawAll(names = Object.keys(figures)) {
  if (!names.length) return document.body.setAttribute("data-drawn", "");
  draw(names[0]);
  if (names[0] === "map") showImages(document.getElementById("map"));
  setTimeout(drawAll, 0, names.slice(1));
}

for (const group of document.querySelectorAll(".toggles")) {
  const buttons = [...group.children];
  buttons.forEach(button => button.addEventListener("click", () => {
    buttons.forEach(other => other.setAttribute("aria-pressed", other === button));
    chosen[group.dataset.key] = button.textContent;
    for (const name of Object.keys(figures)) {
      if (group.dataset.key in figures[name][0].choice) draw(name);
    }
  }));
}

const picture = document.getElementById("picture");

// Right of a point or below it; on its other side where the window ends.
function beside(place, size, end) {
  return Math.max(0, place + 16 + size > end ? place - 16 - size : place + 16);
}

function show({ event, points: [point] }) {
  if (point.customdata === undefined) return;
  picture.className = point.data.meta + "-sheet";
  const columns = Number(getComputedStyle(picture).getPropertyValue("--columns"));
  picture.style.setProperty("--x", point.customdata % columns);
  picture.style.setProperty("--y", Math.floor(point.customdata / columns));
  picture.hidden = false;
  const { clientX, clientY } = event.changedTouches ? event.changedTouches[0] : event;
  const { clientWidth, clientHeight } = document.documentElement;
  picture.style.left = beside(clientX, picture.offsetWidth, clientWidth) + "px";
  picture.style.top = beside(clientY, picture.offsetHeight, clientHeight) + "px";
}

function hide() {
  picture.hidden = true;
}

function showImages(map) {
  // A finger points at nothing: a tap is a click.
  for (const [event, answer] of [["plotly_hover", show], ["plotly_click", show], ["plotly_unhover", hide]]) {
    map.removeAllListeners(event);
    map.on(event, answer);
  }
  // Before plotly's own click, which shows the image of the point that was tapped, if any.
  document.addEventListener("pointerdown", hide);
}

window.addEventListener("load", () => drawAll());
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
