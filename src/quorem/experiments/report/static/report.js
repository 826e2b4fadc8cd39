(() => {
  "use strict";
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Theme: what the reader chose, else what the system asks for. Storage may be refused to a file.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("quorem-theme"); } catch { return null; } };
  const toggle = document.getElementById("theme");
  function setTheme(name) {
    root.dataset.theme = name;
    const other = name === "dark" ? "light" : "dark";
    toggle.querySelector(".name").textContent = `${other[0].toUpperCase()}${other.slice(1)} theme`;
  }
  toggle.addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("quorem-theme", root.dataset.theme); } catch { /* lasts for this visit */ }
  });
  system.addEventListener("change", () => { if (!kept()) setTheme(system.matches ? "dark" : "light"); });
  setTheme(kept() || (system.matches ? "dark" : "light"));

  // A legend hides series in the charts beside it.
  for (const legend of all(".legend")) legend.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const part of all(`[data-series="${button.dataset.hides}"]`, legend.parentElement)) {
      part.style.display = shown ? "" : "none";
    }
  });

  // What is known about the point under the pointer or finger.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const kind of ["pointerover", "click"]) document.addEventListener(kind, (event) => {
    const point = event.target.closest("[data-about]");
    tip.hidden = !point;
    if (!point) return;
    tip.textContent = point.dataset.about;
    const box = point.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.right + 8, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(box.bottom + 8, innerHeight - tip.offsetHeight - 8))}px`;
  });

  // The table of all points: sort by a heading or a choice, filter by words.
  const table = document.getElementById("points");
  if (table) {
    const points = all("tbody", table);
    const keys = new Map(points.map((point) => [point, JSON.parse(point.dataset.keys)]));
    const headings = all("thead th", table);
    const sort = document.getElementById("sort");
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
    const sortBy = (key, up) => {
      sort.value = key;
      headings.forEach((heading, k) => {
        heading.setAttribute("aria-sort", String(k) !== key ? "none" : up ? "ascending" : "descending");
      });
      const sorted = key === "" ? points : [...points].sort((a, b) => {
        const [one, other] = [keys.get(a)[key], keys.get(b)[key]];
        const empty = (one === null) - (other === null); // what has no value stays last
        return empty || (one === null ? 0 : (up ? 1 : -1) * compare(one, other));
      });
      table.append(...sorted);
    };
    headings.forEach((heading, k) => heading.querySelector("button").addEventListener("click", () => {
      sortBy(String(k), heading.getAttribute("aria-sort") !== "ascending");
    }));
    sort.addEventListener("change", () => sortBy(sort.value, true));

    // Words of a text: a number is one word, without its thousands separators. "60" does not find 0.4560.
    const wordsOf = (text) => text.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1").split(/[^\p{L}\p{N}._]+/u)
      .map((word) => word.replace(/^\.+|\.+$/g, "")).filter(Boolean);
    const words = new Map(points.map((point) => {
      const parts = [...point.rows[0].cells, ...all("summary, .more", point)];
      return [point, wordsOf(parts.map((part) => part.textContent).join(" "))];
    }));
    const has = (known, word) => known.includes(word)
      || (/\p{L}/u.test(word) && known.some((other) => other.startsWith(word)));
    const search = document.querySelector("#filters input");
    const filter = () => {
      const wanted = wordsOf(search.value);
      let found = 0;
      for (const point of points) {
        point.hidden = !wanted.every((word) => has(words.get(point), word));
        found += !point.hidden;
      }
      const every = `${points.length.toLocaleString("en")} point${points.length === 1 ? "" : "s"}`;
      document.getElementById("shown").textContent = found === points.length ? every : `${found} of ${every}`;
    };
    search.addEventListener("input", filter);
    document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
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
  root.dataset.ready = "yes";
})();
