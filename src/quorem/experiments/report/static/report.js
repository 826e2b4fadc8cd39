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
    const other = name === "dark" ? "light" : "dark";
    toggle.querySelector(".name").textContent = `${other[0].toUpperCase()}${other.slice(1)} theme`;
    toggle.setAttribute("aria-label", `Switch to the ${other} theme`);
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

  // Curves begin with their end; a button shows all of them.
  for (const button of all(".zoom button")) {
    const boxes = all(".plot", button.closest(".drawn"));
    let whole = false;
    button.addEventListener("click", () => {
      whole = !whole;
      button.textContent = whole ? button.dataset.end : button.dataset.all;
      for (const box of boxes) {
        const range = plots[box.id].layout.yaxis.range;
        Plotly.relayout(box, whole || !range ? { "yaxis.autorange": true } : { "yaxis.range": range });
      }
    });
  }

  // The table of all points: sort by a heading or a choice, filter by words and choices.
  const table = document.getElementById("points");
  if (table) {
    const LIMIT = 50; // points before "show all"
    const original = all("tbody", table);
    const keys = new Map(original.map((point) => [point, JSON.parse(point.dataset.keys)]));
    const headings = all("thead th", table);
    const form = document.getElementById("filters");
    const sort = document.getElementById("sort");
    const direction = document.getElementById("direction");
    const more = document.getElementById("more");
    const output = document.getElementById("shown");
    const number = (value) => value.toLocaleString("en");
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
    let points = original, up = true, expanded = false;

    function sortBy(key, ascending) {
      up = ascending;
      sort.value = String(key);
      direction.disabled = key === "";
      for (const heading of headings) {
        const own = heading.dataset.key === String(key);
        heading.setAttribute("aria-sort", own ? (up ? "ascending" : "descending") : "none");
      }
      points = key === "" ? original : [...original].sort((a, b) => {
        const [one, other] = [keys.get(a)[key], keys.get(b)[key]];
        const empty = (one === null) - (other === null); // what has no value stays last
        return empty || (one === null ? 0 : (up ? 1 : -1) * compare(one, other));
      });
      table.append(...points);
      filter();
    }
    for (const heading of headings) heading.querySelector("button").addEventListener("click", () => {
      sortBy(heading.dataset.key, heading.getAttribute("aria-sort") !== "ascending");
    });
    sort.addEventListener("change", () => sortBy(sort.value, true));
    direction.addEventListener("click", () => sortBy(sort.value, !up));

    // Words of a text: a number is one word, without its thousands separators. "60" does not find 0.4560.
    const wordsOf = (text) =>
      text.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1").split(/[^\p{L}\p{N}._]+/u)
        .map((word) => word.replace(/^\.+|\.+$/g, "")).filter(Boolean);
    const words = new Map(original.map((point) => {
      const parts = [...point.rows[0].cells, ...all("summary, .more", point)];
      return [point, new Set(wordsOf(parts.map((part) => part.textContent).join(" ")))];
    }));
    const has = (known, word) => known.has(word)
      || (/\p{L}/u.test(word) && [...known].some((other) => other.startsWith(word)));

    function filter() {
      const wanted = wordsOf(form.querySelector("input").value);
      const choices = all("select[data-filter]", form).filter((select) => select.value);
      let found = 0, shown = 0;
      for (const point of points) {
        const fits = wanted.every((word) => has(words.get(point), word))
          && choices.every((select) => point.dataset[select.dataset.filter] === select.value);
        found += fits;
        point.hidden = !fits || (!expanded && found > LIMIT);
        shown += !point.hidden;
      }
      const every = `${number(points.length)} ${points.length === 1 ? "point" : "points"}`;
      output.textContent = found === points.length ? every : `${number(found)} of ${every}`;
      more.hidden = shown === found;
      more.textContent = `Show all ${number(found)} points`;
    }
    more.addEventListener("click", () => { expanded = true; filter(); });
    for (const happened of ["input", "change"]) form.addEventListener(happened, filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    sort.value = "";
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
