"use strict";
(() => {
  const { specs, charts } = JSON.parse(document.getElementById("charts").textContent);

  const rowsOf = (columns) => {
    const names = Object.keys(columns);
    return columns[names[0]].map((_, place) => Object.fromEntries(names.map((name) => [name, columns[name][place]])));
  };

  const draw = async (place) => {
    const { spec, data } = charts[place.dataset.chart];
    place.removeAttribute("data-chart");
    const datasets = Object.fromEntries(Object.entries(data).map(([name, columns]) => [name, rowsOf(columns)]));
    try {
      // The interpreter of expressions needs no eval, which the page's policy forbids.
      await vegaEmbed(place, { ...specs[spec], datasets }, { renderer: "svg", actions: false, ast: true });
    } catch (error) {
      place.textContent = `This chart could not be drawn: ${error.message}`;
    }
  };

  // A chart takes the width of its place, so hidden ones wait until they are shown.
  const drawVisible = async () => {
    for (const place of document.querySelectorAll("[data-chart]")) {
      if (place.offsetParent && place.dataset.chart) await draw(place);
    }
  };

  // A list shows one of the contests of its own section.
  const choose = (choice) => {
    for (const contest of choice.closest("section").querySelectorAll("[data-contest]")) {
      contest.hidden = contest.dataset.contest !== choice.value;
    }
  };
  for (const choice of document.querySelectorAll("select")) {
    choice.addEventListener("change", () => {
      choose(choice);
      drawVisible();
    });
    choose(choice);
  }
  drawVisible();

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();
