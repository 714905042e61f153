/* Live updates, keyboard shortcuts, copying and confirmations. Every page works without this script. */
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Times: relative, and exact on hover, in the viewer's time zone ------------------------------------------------

  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
  const hour = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
  const second = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

  function duration(seconds) {
    if (seconds < 1) return "0 s";
    let left = Math.round(seconds);
    const words = [];
    for (const [length, unit] of UNITS) {
      const n = Math.floor(left / length);
      left -= n * length;
      if (n || words.length) words.push([n, unit]);
      if (words.length === 2) break;
    }
    return words.filter(([n]) => n).map(([n, unit]) => `${n} ${unit}`).join(" ");
  }

  function relative(seconds) {
    if (Math.abs(seconds) < 1) return "now";
    const [length, unit] = UNITS.find(([length]) => Math.round(Math.abs(seconds)) >= length);
    const words = `${Math.floor(Math.round(Math.abs(seconds)) / length)} ${unit}`;
    return seconds > 0 ? `${words} ago` : `in ${words}`;
  }

  function showTimes(root) {
    const now = Date.now();
    for (const element of $$("[data-time]", root)) {
      const moment = new Date(element.getAttribute("datetime") || element.dataset.stamp);
      const seconds = (now - moment) / 1000;
      const kind = element.dataset.time;
      const words = kind === "ago" ? relative(seconds) : kind === "since" ? duration(Math.max(0, seconds))
        : kind === "second" ? second.format(moment) : kind === "hour" ? hour.format(moment) : kind === "day" ? day.format(moment) : exact.format(moment);
      if (element.textContent !== words) element.textContent = words;
      if (element.title !== undefined && (kind === "ago" || kind === "since")) {
        const title = exact.format(moment);
        if (element.title !== title) element.title = title;
      }
    }
  }

  function prepare(root) {
    showTimes(root);
    for (const button of $$(".copy", root)) button.hidden = false;
    for (const name of ["csrf", "once"]) {
      const token = $(`meta[name="${name}"]`);
      for (const field of $$(`input[name="${name}"]`, root)) if (!field.value && token) field.setAttribute("value", token.content);
    }
  }

  // Updates: an element that stays keeps its focus, selection, scroll position and state ---------------------------

  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || "" : "");

  function morph(from, to) {
    if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) return from.replaceWith(to);
    if (from.nodeType !== 1) {
      if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
      return;
    }
    if (from.isEqualNode(to)) return;
    morphAttributes(from, to);
    if (from.nodeName !== "TEXTAREA") morphChildren(from, to);
  }

  function morphAttributes(from, to) {
    const isTheirs = (name) => name === "open" && from.nodeName === "DETAILS"; // the viewer opens and closes it
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && !isTheirs(name)) from.removeAttribute(name);
    }
    for (const { name, value } of [...to.attributes]) {
      if (from.getAttribute(name) !== value && !isTheirs(name)) from.setAttribute(name, value);
    }
  }

  function morphChildren(from, to) {
    const wanted = new Set([...to.children].map(keyOf).filter(Boolean));
    const keyed = new Map();
    for (const child of [...from.children]) {
      const key = keyOf(child);
      if (key && !wanted.has(key)) child.remove();
      else if (key) keyed.set(key, child);
    }
    let cursor = from.firstChild;
    for (const child of [...to.childNodes]) {
      const key = keyOf(child);
      const match = key ? keyed.get(key) : cursor && !keyOf(cursor) && cursor.nodeName === child.nodeName ? cursor : null;
      if (!match) from.insertBefore(child, cursor);
      else {
        const next = cursor ? cursor.nextSibling : null;
        if (match === cursor) cursor = next;
        else from.insertBefore(match, cursor);
        morph(match, child);
      }
    }
    while (cursor) {
      const next = cursor.nextSibling;
      cursor.remove();
      cursor = next;
    }
  }

  function patch(regions) {
    const focused = document.activeElement;
    for (const [id, html] of Object.entries(regions)) {
      const region = document.getElementById(id);
      if (!region) continue;
      const copy = region.cloneNode(false);
      copy.innerHTML = html;
      prepare(copy);
      morphChildren(region, copy);
    }
    if (focused && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
    mark(rowAt);
    count();
    document.dispatchEvent(new CustomEvent("batchwright:patched"));
  }

  let source = null;
  let failures = 0;
  let retry = 0;

  function state(words, isOn) {
    const element = $("#live-state");
    if (!element) return;
    element.hidden = false;
    if (element.textContent !== words) element.textContent = words;
    element.classList.toggle("off", !isOn);
  }

  function connect() {
    clearTimeout(retry);
    if (source || document.hidden || !document.body.hasAttribute("data-live")) return;
    source = new EventSource(location.href);
    source.addEventListener("open", () => { failures = 0; state("Live", true); });
    source.addEventListener("patch", (event) => { state("Live", true); patch(JSON.parse(event.data)); });
    source.addEventListener("trouble", (event) => state(JSON.parse(event.data).message, false));
    source.addEventListener("leave", () => location.reload());
    source.addEventListener("error", () => {
      state("Reconnecting…", false);
      if (source && source.readyState === EventSource.CLOSED) lost();
    });
  }

  function disconnect() {
    if (source) source.close();
    source = null;
  }

  async function lost() {
    disconnect();
    failures += 1;
    try {
      const answer = await fetch(location.href, { redirect: "manual", headers: { Accept: "text/html" } });
      if (answer.type === "opaqueredirect") return location.reload();
    } catch { /* the server is gone: try again later */ }
    retry = setTimeout(connect, Math.min(30000, 1000 * 2 ** failures));
  }

  // A level of a tree opens in place: the same page is followed under its new address.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.toggle");
    if (!link || !source || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    history.pushState(null, "", link.href.replace(/#.*/, ""));
    disconnect();
    connect();
  });
  window.addEventListener("popstate", () => { disconnect(); connect(); });

  // A browser opens at most six connections to a server: hidden pages must not hold them.
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", connect);

  // Forms: ask for confirmation, and send once --------------------------------------------------------------------

  document.addEventListener("submit", (event) => {
    const form = event.target;
    const words = form.dataset.confirm;
    if (words && !form.dataset.confirmed) {
      event.preventDefault();
      return ask(words, event.submitter ? event.submitter.textContent.trim() : "OK", () => {
        form.dataset.confirmed = "yes";
        form.requestSubmit(event.submitter || undefined);
      });
    }
    delete form.dataset.confirmed;
    if (form.method === "post") setTimeout(() => { for (const button of $$("button", form)) button.disabled = true; });
  });
  // Whoever comes back to a page means a new form, and not the one that was sent from it.
  window.addEventListener("pageshow", (event) => {
    for (const button of $$("form[method=post] button:disabled")) button.disabled = false;
    const token = $('meta[name="once"]');
    if (!event.persisted || !token) return;
    token.content = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    for (const field of $$('input[name="once"]')) field.setAttribute("value", token.content);
  });

  function ask(words, verb, then) {
    const dialog = document.createElement("dialog");
    const text = document.createElement("p");
    const form = document.createElement("form");
    form.method = "dialog";
    text.textContent = words;
    text.id = "ask-text";
    dialog.setAttribute("aria-labelledby", "ask-text");
    for (const [label, value, kind] of [["Keep as it is", "", ""], [verb, "yes", "primary"]]) {
      const button = document.createElement("button");
      button.textContent = label;
      button.value = value;
      button.className = kind;
      form.append(button);
    }
    dialog.append(text, form);
    dialog.addEventListener("close", () => { dialog.remove(); if (dialog.returnValue) then(); });
    document.body.append(dialog);
    dialog.showModal();
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => button.setAttribute("aria-label", `Copy ${button.dataset.copy}`), 1500);
  });

  // Selecting rows ------------------------------------------------------------------------------------------------

  function count() {
    const boxes = $$('input[type="checkbox"][data-row]');
    const chosen = boxes.filter((box) => box.checked).length;
    for (const element of $$("[data-selected]")) element.textContent = chosen ? `${chosen.toLocaleString()} selected` : "";
    for (const all of $$("input[data-all]")) {
      all.checked = chosen > 0 && chosen === boxes.length;
      all.indeterminate = chosen > 0 && chosen < boxes.length;
    }
  }

  document.addEventListener("change", (event) => {
    if (event.target.matches("input[data-all]")) {
      for (const box of $$('input[type="checkbox"][data-row]')) box.checked = event.target.checked;
    }
    if (event.target.matches("select[data-send]")) event.target.form.requestSubmit();
    count();
  });

  // Keys ----------------------------------------------------------------------------------------------------------

  let rowAt = null;
  let chord = 0;
  const GOES = { o: "/ui", j: "/ui/jobs", b: "/ui/batches", i: "/ui/inbox" };

  function mark(row) {
    for (const other of $$(".at")) other.classList.remove("at");
    rowAt = row && row.isConnected ? row : null;
    if (rowAt) rowAt.classList.add("at");
  }

  function step(by) {
    const rows = $$("table.rows tbody tr, .tree .twig");
    if (!rows.length) return;
    const at = rows.indexOf(rowAt);
    mark(rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + by))]);
    rowAt.scrollIntoView({ block: "nearest" });
    const link = $("a:not(.toggle)", rowAt);
    if (link) link.focus({ preventScroll: true });
  }

  function help() {
    const dialog = $("#help");
    if (dialog && !dialog.open) dialog.showModal();
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input:not([type=checkbox]), textarea, select, dialog[open]")) {
      if (event.key === "Escape" && event.target.matches("input, textarea")) event.target.blur();
      return;
    }
    if (chord && Date.now() - chord < 1500 && GOES[event.key]) {
      const link = $(`.menu a[href^="${GOES[event.key]}"]`);
      chord = 0;
      if (link) link.click();
      return;
    }
    chord = event.key === "g" ? Date.now() : 0;
    const search = $("#search");
    if (event.key === "/" && search) search.focus();
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "x" && rowAt) { const box = $("input[data-row]", rowAt); if (box) box.click(); }
    else if (event.key === "Enter" && rowAt && event.target === document.body) { const link = $("a", rowAt); if (link) link.click(); }
    else if (event.key === "?") help();
    else return;
    event.preventDefault();
  });

  // Dropping files: a form with data-drop sends the file that is dropped on it ---------------------------------------

  for (const area of $$("[data-drop]")) {
    const input = $("input[type=file]", area);
    area.addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("over"); });
    area.addEventListener("dragleave", () => area.classList.remove("over"));
    area.addEventListener("drop", (event) => {
      event.preventDefault();
      area.classList.remove("over");
      if (!event.dataTransfer.files.length) return;
      input.files = event.dataTransfer.files;
      input.form.requestSubmit();
    });
  }

  const opener = $("#help-open");
  if (opener) {
    opener.hidden = false;
    opener.addEventListener("click", help);
  }
  const current = $(".menu [aria-current]");
  if (current) current.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone the menu is a row
  prepare(document);
  count();
  connect();
  setInterval(() => { if (!document.hidden) showTimes(document); }, 1000);
})();
