"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  for (const button of all("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  }

  const key = (row, at) => {
    const cell = row.cells[at];
    const figure = cell.dataset.v;
    return figure === undefined ? cell.textContent.trim() : Number(figure);
  };
  // What has no figure comes last, whichever the direction.
  const order = (a, b, sign) => {
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return sign * a.localeCompare(b);
  };
  for (const head of all("table.sortable th.sort")) {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      for (const other of all("th[aria-sort]", head.parentNode)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const body = head.closest("table").tBodies[0];
      const rows = [...body.rows].map((row) => [key(row, head.cellIndex), row]);
      rows.sort(([a], [b]) => order(a, b, ascending ? 1 : -1));
      body.append(...rows.map(([, row]) => row));
    });
  }

  for (const input of all("input.filter")) {
    input.closest("label").hidden = false;
    const section = input.closest("section");
    const count = section.querySelector("output");
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      const rows = all("tbody tr", section);
      for (const row of rows) {
        const group = row.closest(".group")?.querySelector("h3")?.textContent ?? "";
        row.hidden = !`${group} ${row.textContent}`.toLowerCase().includes(wanted);
      }
      for (const group of all(".group", section)) {
        group.hidden = !group.querySelector("tbody tr:not([hidden])");
        if (wanted) group.open = true;
      }
      const left = rows.filter((row) => !row.hidden).length;
      count.textContent = wanted ? `${left} of ${rows.length} rows` : "";
    });
  }
})();
