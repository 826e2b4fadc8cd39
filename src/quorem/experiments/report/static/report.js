(() => {
  "use strict";
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const colours = JSON.parse(document.getElementById("colours").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Theme: what the reader chose, else what the system asks for. Storage may be refused to a file.
  const KEY = "quorem-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem(KEY, name); } catch { /* lasts for this visit */ } };
  const toggle = document.getElementById("theme");

  function setTheme(name) {
    root.dataset.theme = name;
    toggle.setAttribute("aria-pressed", String(name === "dark"));
  }
  toggle.addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    keep(name);
    setTheme(name);
    drawAll();
  });
  system.addEventListener("change", () => {
    if (!kept()) { setTheme(system.matches ? "dark" : "light"); drawAll(); }
  });
  setTheme(kept() || (system.matches ? "dark" : "light"));

  // Plots.
  const coarse = matchMedia("(pointer: coarse)").matches;
  const hidden = new Map(); // plot -> series that its legend has put away

  function coloured(trace, theme) {
    const { role, series } = trace.meta;
    const colour = role === "front" ? theme("--front") : colours[series][root.dataset.theme === "dark" ? 1 : 0];
    const done = { ...trace, line: { ...trace.line, color: colour } };
    if (trace.marker) done.marker = { ...trace.marker, color: colour, line: { color: theme("--card"), width: 0.8 } };
    if (trace.error_y) done.error_y = { ...trace.error_y, color: colour };
    if (role === "band") done.fillcolor = colour + "2e";
    return done;
  }

  function draw(box) {
    const style = getComputedStyle(root);
    const theme = (name) => style.getPropertyValue(name).trim();
    const { data, layout } = plots[box.id];
    const away = hidden.get(box.id) || new Set();
    const axis = (found) => ({
      ...found, gridcolor: theme("--grid"), linecolor: theme("--line"), tickcolor: theme("--line"),
    });
    const family = getComputedStyle(document.body).fontFamily;
    const size = box.clientWidth < 420 ? 11 : 12.5;
    const traces = data.map((trace) => ({ ...coloured(trace, theme), visible: !away.has(trace.meta.series) }));
    return Plotly.react(box, traces, {
      ...layout,
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size, color: theme("--quiet") },
      hoverlabel: {
        ...layout.hoverlabel,
        bgcolor: theme("--card"), bordercolor: theme("--quiet"), font: { family, size, color: theme("--text") },
      },
      dragmode: coarse ? false : "zoom", // a finger scrolls the page
      uirevision: "kept",
    }, { responsive: true, displayModeBar: false });
  }
  const drawAll = () => Promise.all(all(".plot").map(draw));

  for (const legend of all(".legend")) {
    const boxes = all(".plot", legend.parentElement);
    legend.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const on = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!on));
      const away = new Set(all('[aria-pressed="false"]', legend).map((b) => b.dataset.series));
      for (const box of boxes) { hidden.set(box.id, away); draw(box); }
    });
  }

  // The table of all points: sort by a heading, filter by words and choices.
  const table = document.getElementById("points");
  if (table) {
    const points = all("tbody", table);
    const headings = all("thead th", table);
    const value = (point, column, number) => {
      const text = point.rows[0].cells[column].dataset.value;
      return number ? (text === "" ? NaN : Number(text)) : text;
    };
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;

    headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const number = heading.dataset.kind === "number";
      const keyed = points.map((point, at) => ({ point, at, key: value(point, column, number) }));
      keyed.sort((a, b) => {
        const empty = Number.isNaN(a.key) - Number.isNaN(b.key); // what has no number stays last
        return empty || (up ? 1 : -1) * compare(a.key, b.key) || a.at - b.at;
      });
      table.append(...keyed.map(({ point }) => point));
    }));

    const form = document.getElementById("filters");
    const shown = document.getElementById("shown");
    const texts = new Map(points.map((point) => [point, point.textContent.toLowerCase()]));
    const filter = () => {
      const words = form.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
      const choices = all("select", form).filter((select) => select.value);
      let count = 0;
      for (const point of points) {
        const fits = words.every((word) => texts.get(point).includes(word))
          && choices.every((select) => point.dataset[select.dataset.filter] === select.value);
        point.hidden = !fits;
        count += fits;
      }
      const every = points.length.toLocaleString("en");
      shown.textContent = count === points.length ? `${every} points` : `${count.toLocaleString("en")} of ${every} points`;
    };
    for (const happened of ["input", "change"]) form.addEventListener(happened, filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    filter(); // a browser may have kept what was typed before
  }

  // Copy.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy button");
    if (!button) return;
    const pre = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(pre); // the reader's own copy command does the rest
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });

  drawAll().then(() => { root.dataset.ready = "yes"; });
})();
