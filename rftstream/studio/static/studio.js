// What the pages do beyond links and forms: tokens to step through, a slider for versions. (Curves: charts.js.)
// All of it is there without scripts, too: numbers under the pointer as titles, a field for versions.
"use strict";
(() => {
  // ------------------------------------------------------------------------------------------------ tokens

  function tokens() {
    const box = document.querySelector("[data-tokens]"), line = document.getElementById("token-numbers");
    if (!box || !line) return;
    let on = null;
    const show = (token) => {
      if (!token || !token.classList.contains("t")) return;
      if (on) on.classList.remove("on");
      on = token;
      on.classList.add("on");
      line.textContent = token.title;
    };
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Tokens; the arrow keys step through them");
    box.addEventListener("mouseover", (event) => show(event.target));
    box.addEventListener("click", (event) => show(event.target));
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      if (!step) return;
      event.preventDefault();
      show(on ? on[step] : box.firstElementChild);
      if (on) on.scrollIntoView({ block: "nearest" });
    });
  }

  // ------------------------------------------------------------------------------------------------ the rest

  function slider() {
    const range = document.querySelector("[data-range]");
    const field = range && document.getElementById(range.dataset.range);
    if (!field) return;
    range.addEventListener("input", () => { field.value = "v" + range.value; });
    range.addEventListener("change", () => {
      if (range.value === range.max) field.value = "";
      range.form.requestSubmit();
    });
  }

  // A choice by pointer is made at once. By keys each option that is passed would be one, and a range has two fields:
  // there Enter or the button does it.
  function filters() {
    for (const form of document.querySelectorAll("form.filters")) {
      let byKeys = false;
      form.addEventListener("keydown", () => { byKeys = true; });
      form.addEventListener("pointerdown", () => { byKeys = false; });
      form.addEventListener("change", (event) => { if (event.target.matches("select") && !byKeys) form.requestSubmit(); });
    }
  }

  // Letters that stand on buttons press them, as long as nobody types: focus is in the answers, or nowhere.
  function keys() {
    document.addEventListener("keydown", (event) => {
      const on = document.activeElement;
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && on.matches("[data-submit]")) {
        event.preventDefault();
        on.form.requestSubmit();
        return;
      }
      if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.isComposing) return;
      if (on !== document.body && on.id !== "view" && (!on.closest("[data-keys]") || on.matches("textarea, input"))) return;
      const wanted = event.key.toLowerCase(), found = [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === wanted);
      if (!found) return;
      event.preventDefault();
      if (found.matches("input")) found.focus(); else found.click();
    });
  }

  // Each answer is sent once, however often its key is pressed before the next page is there.
  function once() {
    for (const form of document.querySelectorAll("form.answers, form.ask, .said form"))
      form.addEventListener("submit", (event) => {
        if (form.dataset.sent) event.preventDefault();
        else form.dataset.sent = "yes";
      });
    addEventListener("pageshow", () => { for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent; });
  }

  // ---------------------------------------------------------------------------------------------- changes

  function follow() { // the browser asks again by itself after a connection that broke, but not after a refusal
    const live = document.getElementById("live");
    if (!live) return;
    let source = null, seen = live.dataset.seen, later = null;
    const close = () => { if (source) source.close(); source = null; clearTimeout(later); };
    const open = () => {
      close();
      source = new EventSource(`${live.dataset.events}?seen=${seen}`);
      source.addEventListener("changed", (event) => { seen = event.data; live.dispatchEvent(new Event("changed")); });
      source.addEventListener("error", () => { if (source && source.readyState === EventSource.CLOSED) later = setTimeout(open, 3000); });
    };
    live.addEventListener("changed", charts.soon);
    document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else open(); });
    addEventListener("pagehide", close);
    addEventListener("pageshow", (event) => { if (event.persisted) open(); });
    if (!document.hidden) open();
  }

  document.addEventListener("DOMContentLoaded", () => {
    tokens();
    keys();
    once();
    slider();
    filters();
    follow();
    const tab = document.querySelector(".tabs [aria-current]");
    if (tab) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
})();
