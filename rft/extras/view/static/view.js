// Curves, news of a run that goes on, keys.  Pages work without it, curves apart.  Texts of the run are only ever set as text.
"use strict";
(() => {
  const $ = (s) => document.querySelector(s);
  const run = document.body.dataset.run;
  const PALETTE = ["#2f7fd0", "#d55e00", "#009e73", "#b0609a", "#c08a00", "#56b4e9", "#888888", "#6a51a3"]; // after Okabe and Ito
  const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

  // ---------------------------------------------------------------- light and dark
  const stored = (() => { try { return localStorage; } catch { return null; } })();
  const theme = stored && stored.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
  function toggle() {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    if (stored) stored.setItem("theme", document.documentElement.dataset.theme);
    for (const p of plots) p.shape = ""; // drawn anew, in other colours
    draw();
  }
  $("#theme").addEventListener("click", toggle);
  $("#keys").addEventListener("click", () => $("#help").showModal());

  // ---------------------------------------------------------------- curves
  const place = $("#charts"), options = $("#chart-options");
  let told = null, plots = [], zoom = null;

  function smooth(y, by) {
    if (!by) return y;
    let mean = null;
    return y.map((v) => (v === null ? null : (mean = mean === null ? v : by * mean + (1 - by) * v)));
  }

  const joined = (about, by) => uPlot.join(about.curves.map((c) => [c.x, smooth(c.y, by)]), about.curves.map(() => [2]));
  const few = (c) => c.x.length < 40; // then each point is shown
  const shape = (about) => JSON.stringify([told.x, about.title, about.curves.map((c) => [c.label, c.group, c.dash, few(c)])]);

  function chart(about, by) {
    const box = document.createElement("section"), head = document.createElement("h3");
    box.className = "chart";
    head.textContent = about.title;
    box.append(head);
    place.append(box);
    const style = getComputedStyle(document.body), ink = style.getPropertyValue("--dim"), line = style.getPropertyValue("--line");
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
    const colour = (c, i) => PALETTE[(c.group === undefined ? i : c.group) % PALETTE.length];
    // uPlot's own would not end where the range is a hair wide
    const splits = (u, at, min, max, by) => Array.from({ length: by > 0 ? Math.min(100, Math.floor(max / by) - Math.ceil(min / by) + 1) : 0 }, (_, i) => +((Math.ceil(min / by) + i) * by).toPrecision(12));
    const compact = (u, values) => values.map((v) => (v === null ? "" : Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1) : +v.toPrecision(6)));
    const plot = new uPlot({
      width: box.clientWidth - 14, height: 190, scales: { x: { time: false } },
      cursor: { sync: { key: "all" }, drag: { x: true, y: false } },
      axes: [{ ...axis, splits, values: compact }, { ...axis, splits, size: 62, values: compact }],
      series: [{ label: told.x, value: (u, v) => (v === null ? "–" : String(+v.toPrecision(8))) },
        ...about.curves.map((c, i) => ({
          label: c.label, stroke: colour(c, i), width: 1.6, dash: DASHES[(c.group === undefined ? Math.floor(i / PALETTE.length) : c.dash) % 4], spanGaps: true,
          points: { show: few(c) }, value: (u, v) => (v === null ? "–" : String(+v.toPrecision(6))),
        }))],
      hooks: { setScale: [(u, key) => { if (key === "x" && u.status === 1) zoomed(u); }] },
    }, joined(about, by), box);
    plot.shape = shape(about);
    plots.push(plot);
  }

  let zooming = false;
  function zoomed(from) { // all charts show the same part
    if (zooming || !plots.includes(from)) return;
    const { min, max } = from.scales.x, whole = from.data[0];
    zoom = min < max && whole.length && (min > whole[0] || max < whole[whole.length - 1]) ? { min, max } : null;
    zooming = true;
    for (const p of plots) {
      if (p === from || !p.data[0].length) continue;
      const wanted = zoom || { min: p.data[0][0], max: p.data[0][p.data[0].length - 1] };
      if (!(wanted.min < wanted.max)) continue; // of one point or none there is no part
      if (p.scales.x.min !== wanted.min || p.scales.x.max !== wanted.max) p.setScale("x", wanted);
    }
    queueMicrotask(() => { zooming = false; });
  }

  function draw() { // charts stay while they show the same curves, so that a pointer or a drag on them is not lost
    if (!place || !told) return;
    const by = Number(options.elements.smooth.value);
    if (plots.length && plots.length === told.charts.length && told.charts.every((about, i) => plots[i].shape === shape(about))) {
      zooming = true;
      told.charts.forEach((about, i) => {
        plots[i].setData(joined(about, by), !zoom);
        if (zoom) plots[i].setScale("x", zoom);
      });
      queueMicrotask(() => { zooming = false; });
      return;
    }
    const at = window.scrollY, height = place.clientHeight;
    place.style.minHeight = height + "px";
    for (const p of plots) p.destroy();
    plots = [];
    place.replaceChildren();
    if (!told.charts.length) {
      const none = document.createElement("p");
      none.textContent = "There are no curves yet.";
      place.append(none);
    }
    zooming = true;
    for (const about of told.charts) chart(about, by);
    if (zoom) for (const p of plots) p.setScale("x", zoom);
    queueMicrotask(() => { zooming = false; });
    place.style.minHeight = "";
    window.scrollTo({ top: at, behavior: "instant" });
    place.dataset.drawn = String(plots.length);
  }

  let asked = 0;
  async function read() {
    if (!place) return;
    const mine = ++asked;
    const url = new URL(place.dataset.points, location.href);
    url.searchParams.set("x", options.elements.x.value);
    if (options.elements.name && options.elements.name.value) url.searchParams.set("name", options.elements.name.value);
    const answer = await fetch(url);
    if (!answer.ok) return;
    const points = await answer.json();
    if (mine !== asked) return; // a later question has been asked
    told = points;
    draw();
  }

  if (place) {
    options.elements.x.addEventListener("change", () => { zoom = null; read(); });
    options.elements.smooth.addEventListener("input", draw);
    if (options.elements.name) options.elements.name.addEventListener("change", read);
    options.addEventListener("submit", (e) => e.preventDefault());
    let width = place.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(place.clientWidth - width) < 2) return;
      width = place.clientWidth;
      for (const p of plots) p.setSize({ width: p.root.parentElement.clientWidth - 14, height: 190 });
    }).observe(place);
    read();
  }

  // ---------------------------------------------------------------- news
  const facts = $("#facts"), fresh = $("#new");
  let source = null;
  async function news() {
    if (fresh) { fresh.hidden = false; fresh.href = location.href; }
    if (!facts) return;
    const answer = await fetch(facts.dataset.facts);
    if (answer.ok) {
      const open = [...facts.querySelectorAll("details")].map((d) => d.open);
      facts.replaceChildren(...new DOMParser().parseFromString(await answer.text(), "text/html").body.childNodes);
      facts.querySelectorAll("details").forEach((d, i) => { if (i < open.length) d.open = open[i]; });
    }
    if (!document.querySelector(".u-over:active")) await read();
    const picture = $("#timeline");
    picture.src = picture.src.split("?")[0] + "?" + Date.now();
  }
  function listen() { // only where it can be seen: a browser keeps few connections to one host
    if (source) { source.close(); source = null; }
    $("#live").hidden = true;
    if (!run || document.hidden || !(facts || fresh)) return;
    source = new EventSource(run + "/events");
    const goes = (e) => { $("#live").hidden = !["starting", "running", "stopping"].includes(JSON.parse(e.data)); };
    source.addEventListener("hello", goes);
    source.addEventListener("changed", (e) => { goes(e); news(); });
    source.addEventListener("error", () => { $("#live").hidden = true; });
  }
  document.addEventListener("visibilitychange", listen);
  window.addEventListener("pagehide", () => { if (source) source.close(); });
  listen();

  if ($("[data-reading]")) news();
  async function complete() { // rows of runs that are still being read
    if (!$("#unread")) return;
    const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
    const marked = new Set([...document.querySelectorAll("#rows input:checked")].map((i) => i.value));
    $("#rows tbody").replaceWith(page.querySelector("#rows tbody"));
    document.querySelectorAll("#rows input").forEach((i) => { i.checked = marked.has(i.value); });
    if (page.querySelector("#unread")) $("#unread").replaceWith(page.querySelector("#unread")); else $("#unread").remove();
    complete();
  }
  complete();

  // ---------------------------------------------------------------- keys
  let at = -1, first = "";
  const rows = () => [...document.querySelectorAll("#rows tbody tr, #rows > .row")].filter((r) => r.querySelector("a.go"));
  function move(by) {
    const all = rows();
    if (!all.length) return;
    if (at >= 0 && all[at]) all[at].classList.remove("at");
    at = Math.max(0, Math.min(all.length - 1, at + by));
    all[at].classList.add("at");
    all[at].querySelector("a.go").focus({ preventScroll: true });
    all[at].scrollIntoView({ block: "nearest" });
  }
  const follow = (s) => { const link = $(s); if (link) link.click(); };
  document.addEventListener("keydown", (e) => {
    if ((e.ctrlKey || e.metaKey) && e.key === "Enter" && e.target.form) { e.target.form.requestSubmit(); return; }
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName)) {
      if (e.key === "Escape") e.target.blur();
      return;
    }
    const before = first;
    first = "";
    if (before === "g") { follow(`[data-key="${CSS.escape(e.key)}"]`); return; }
    const act = {
      g: () => { first = "g"; }, j: () => move(1), k: () => move(-1), t: toggle, "?": () => $("#help").showModal(),
      n: () => follow("#next"), p: () => ($("#prev") ? follow("#prev") : document.getElementById("next") || rows().length ? history.back() : null),
      c: () => { const all = [...document.querySelectorAll("#colours a")]; if (all.length) all[(all.findIndex((a) => a.hasAttribute("aria-current")) + 1) % all.length].click(); },
      "/": () => { const field = $("main input:not([type=hidden]):not([type=checkbox]), main textarea"); if (field) { e.preventDefault(); field.focus(); } },
    }[e.key];
    if (act) act();
  });
})();
