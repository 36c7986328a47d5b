"use strict";
(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const chart = document.getElementById("chart");
  const marker = document.getElementById("marker");
  const slider = document.getElementById("epsilon-slider");
  const field = document.getElementById("epsilon");

  // How many of the ascending values are below a limit, or up to it.
  const count = (values, isBelow) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBelow(values[middle])) low = middle + 1; else high = middle;
    }
    return low;
  };
  const percent = (part, whole) => (100 * part / whole).toFixed(2) + "\u202f%";
  const group = (number) => number.toLocaleString("en");
  const write = (card, kind, part, whole, what) => {
    const place = card.querySelector("." + kind);
    place.querySelector("b").textContent = percent(part, whole);
    place.querySelector("small").textContent = group(part) + " of " + group(whole) + what;
  };
  const show = (epsilon) => {
    numbers.runs.forEach((run, k) => {
      const card = document.querySelector('[data-run="' + k + '"]');
      write(card, "certified", run.radii.length - count(run.radii, (r) => r < epsilon), run.count, "");
      if (run.attacked) {
        const fooled = count(run.distances, (d) => d <= epsilon * numbers.slack);
        let what = " attacked";
        if (run.attacked < run.count) {  // shares of the same inputs, between which this one lies
          const proved = run.attacked_radii.length - count(run.attacked_radii, (r) => r < epsilon);
          what += ", of which " + percent(proved, run.attacked) + " certified and " +
            percent(run.survivors, run.attacked) + " clean";
        }
        write(card, "attacked", run.survivors - fooled, run.attacked, what);
      }
    });
    const share = Math.min(epsilon / numbers.end, 1);
    const x = numbers.left + share * (numbers.right - numbers.left);
    marker.setAttribute("x1", x);
    marker.setAttribute("x2", x);
  };
  const move = (epsilon) => {
    slider.value = epsilon;
    field.value = Number(epsilon.toPrecision(4));
    show(Number(field.value));
  };
  slider.addEventListener("input", () => move(Number(slider.value)));
  field.addEventListener("input", () => {
    const epsilon = Number(field.value);
    if (field.value === "" || !(epsilon >= 0)) return;
    slider.value = epsilon;
    show(epsilon);
  });
  const follow = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const share = (x - numbers.left) / (numbers.right - numbers.left);
    move(Math.min(Math.max(share, 0), 1) * numbers.end);
  };
  chart.addEventListener("pointerdown", follow);
  chart.addEventListener("pointermove", follow);
  show(Number(field.value));

  // A table that is wider than the page says so.
  const box = document.querySelector(".scroll");
  const sayThatItScrolls = () => {
    document.querySelector(".sideways").hidden = box.scrollWidth <= box.clientWidth;
  };
  window.addEventListener("resize", sayThatItScrolls);
  sayThatItScrolls();

  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const current = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = current === "dark" ? "light" : "dark";
  });
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((block) => { block.open = true; });
  });
})();
