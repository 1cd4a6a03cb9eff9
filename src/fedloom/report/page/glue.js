// Glue between the data of this page and Apache ECharts: controls, themes, sortable tables, and news where it is live.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const read = (doc) => JSON.parse(doc.getElementById("data").textContent);
  let data = read(document);
  const charts = {};
  const hidden = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const unique = (values) => [...new Set(values)];
  const AXES = { round: "round", bytes: "MB sent", seconds: "simulated seconds", gradients: "gradients of a batch" };

  const element = (name, text, more = {}) => Object.assign(document.createElement(name), { textContent: text, ...more });

  const shown = (value, share) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    return share ? `${(100 * value).toFixed(2)} %` : String(Number(value.toPrecision(5)));
  };

  // A long name may break after a slash.
  const broken = (name) => {
    const out = element("span", "");
    out.append(...name.split(/(?<=\/)/).flatMap((part, k) => (k ? [document.createElement("wbr"), part] : [part])));
    return out;
  };

  const options = (select, values, labels = values) => {
    const before = select.value;
    select.replaceChildren(...values.map((value, k) => element("option", labels[k], { value })));
    if (values.includes(before)) select.value = before;
  };

  const fill = (table, header, rows) => {
    const head = element("tr", "");
    head.append(...header.map((text, k) => element("th", text, { scope: "col", className: k ? "n" : "" })));
    const body = rows.map((cells) => {
      const row = element("tr", "");
      row.append(...cells.map((text, k) => element(k ? "td" : "th", text, k ? { className: "n" } : { scope: "row" })));
      return row;
    });
    const thead = element("thead", ""), tbody = element("tbody", "");
    thead.append(head);
    tbody.append(...body);
    table.replaceChildren(thead, tbody);
  };

  const draw = (id, option) => {
    const place = $(id);
    if (!place) return;
    charts[id] ??= echarts.init(place, null, { renderer: "svg" });
    const base = {
      animation: !still.matches && !document.body.dataset.live, animationDuration: 250, backgroundColor: "transparent",
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("--ink") },
    };
    charts[id].setOption({ ...base, ...option }, { notMerge: true });
  };

  const axis = (name, more) => ({
    name, type: "value", nameLocation: "middle", nameTextStyle: { color: colour("--soft") },
    axisLabel: { color: colour("--soft"), hideOverlap: true }, axisLine: { show: true, lineStyle: { color: colour("--line") } },
    splitLine: { lineStyle: { color: colour("--line") } }, ...more,
  });

  const tooltip = (more) => ({
    backgroundColor: colour("--panel"), borderColor: colour("--line"), textStyle: { color: colour("--ink"), fontSize: 13 },
    confine: true, ...more,
  });

  // -- curves ---------------------------------------------------------------------------------------
  const DASHES = ["solid", [6, 3], [2, 2]];
  const names = (lines = data.lines) => unique(lines.map((line) => line.name));
  const look = (line) => {
    if (line.baseline) return { color: colour("--ink"), dash: "solid", width: 2.6 };
    const k = names(data.lines.filter((each) => each.choice === line.choice && !each.baseline)).indexOf(line.name);
    const plain = data.colours[k % data.colours.length];
    const color = dark.matches ? echarts.color.modifyHSL(plain, null, null, 0.64) : plain;
    return { color, dash: DASHES[Math.floor(k / data.colours.length) % DASHES.length], width: 2 };
  };

  const smooth = (values, weight) => {
    let mean = 0, mass = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      mass = weight * mass + 1 - weight;
      return mean / mass;
    });
  };

  const chosen = () =>
    data.lines.filter((line) => line.choice === $("choice").value && line.place === ($("place").value || ""));

  const curves = () => {
    if (!$("choice") || !data.lines.length) return;
    const lines = chosen(), weight = Number($("smoothing").value), on = $("axis").value;
    const share = lines.length > 0 && lines.every((line) => line.share);
    const drawn = lines.filter((line) => line.x[on] && !hidden.has(line.name));
    const series = drawn.flatMap((line) => {
      const style = look(line), y = smooth(line.y, weight), sd = line.sd.length ? smooth(line.sd, weight) : [];
      const points = (values) => values.map((value, k) => [line.x[on][k], value]);
      const quiet = { type: "line", symbol: "none", silent: true, lineStyle: { opacity: 0 }, stack: `band ${line.name}`,
        stackStrategy: "all", emphasis: { disabled: true }, tooltip: { show: false } };
      const band = sd.length ? [
        { ...quiet, id: `low ${line.name}`, name: line.name, data: points(y.map((v, k) => v - sd[k])) },
        { ...quiet, id: `high ${line.name}`, name: line.name, data: points(sd.map((v) => 2 * v)),
          areaStyle: { color: style.color, opacity: 0.15 } },
      ] : [];
      return [...band, {
        type: "line", id: `line ${line.name}`, name: line.name, data: points(y), showSymbol: y.length < 4, symbolSize: 7,
        lineStyle: { color: style.color, width: style.width, type: style.dash }, itemStyle: { color: style.color },
        emphasis: { focus: "series" }, z: line.baseline ? 4 : 3,
      }];
    });
    const percent = (value) => (share ? `${Number((100 * value).toPrecision(6))} %` : String(Number(value.toPrecision(6))));
    draw("curve", {
      series, grid: { left: 12, right: 20, top: 20, bottom: 34, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: axis(data.words[AXES[on]], { nameGap: 28, min: "dataMin", max: "dataMax", minInterval: on === "round" ? 1 : 0,
        splitLine: { show: false } }),
      yAxis: axis("", { scale: !$("zero").checked, axisLabel: { color: colour("--soft"), formatter: percent } }),
      tooltip: tooltip({ trigger: "axis", axisPointer: { type: "line", lineStyle: { color: colour("--soft") } },
        formatter: (points) => described(points, share) }),
    });
    $("meaning").textContent = data.meanings[$("choice").value] ?? "";
    const rounds = unique(drawn.flatMap((line) => line.x[on])).sort((a, b) => a - b);
    const some = rounds.length <= 24 ? rounds : unique([...Array(24).keys()].map((k) => rounds[Math.round((k * (rounds.length - 1)) / 23)]));
    fill($("curve-table"), [data.words[AXES[on]], ...drawn.map((line) => line.name)], some.map((x) =>
      [String(x), ...drawn.map((line) => shown(line.y[line.x[on].indexOf(x)], share))]));
  };

  const described = (points, share) => {
    const box = element("div", ""), own = points.filter((p) => String(p.seriesId).startsWith("line "));
    if (!own.length) return box;
    box.append(element("strong", String(Number(own[0].value[0].toPrecision(6)))));
    const up = [...own].sort((a, b) => b.value[1] - a.value[1]);
    for (const point of up.slice(0, 16)) {
      const row = element("div", ""), swatch = element("span", "● ");
      swatch.style.color = point.color;
      row.append(swatch, `${point.seriesName}: `, element("b", shown(point.value[1], share)));
      box.append(row);
    }
    return box;
  };

  const toggles = () => {
    const boxes = unique(chosen().map((line) => line.name)).map((name) => {
      const line = chosen().find((each) => each.name === name), label = element("label", "");
      const box = element("input", "", { type: "checkbox", checked: !hidden.has(name) });
      box.addEventListener("change", () => { box.checked ? hidden.delete(name) : hidden.add(name); curves(); });
      const swatch = element("span", "", { className: "swatch" });
      swatch.style.background = look(line).color;
      label.append(box, swatch, broken(line.runs > 1 ? `${name} (${data.words["{} seeds"].replace("{}", line.runs)})` : name));
      return label;
    });
    $("lines").replaceChildren(...boxes);
  };

  const choices = () => {
    if (!$("choice")) return;
    options($("choice"), unique(data.lines.map((line) => line.choice)));
    const mine = data.lines.filter((line) => line.choice === $("choice").value);
    options($("place"), unique(mine.map((line) => line.place)));
    $("place-label").hidden = unique(mine.map((line) => line.place)).length < 2;
    const axes = Object.keys(AXES).filter((name) => mine.some((line) => line.x[name]));
    options($("axis"), axes, axes.map((name) => data.words[AXES[name]]));
    toggles();
    curves();
  };

  const along = (event) => {
    const chart = charts.curve, step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!chart || !step) return;
    event.preventDefault();
    const index = chart.getOption().series.findIndex((s) => String(s.id).startsWith("line "));
    if (index < 0) return;
    const last = chart.getOption().series[index].data.length - 1;
    chart.at = Math.min(last, Math.max(0, (chart.at ?? (step > 0 ? -1 : last + 1)) + step));
    chart.dispatchAction({ type: "showTip", seriesIndex: index, dataIndex: chart.at });
  };

  // -- partition, topology --------------------------------------------------------------------------
  const partition = () => {
    const split = data.splits[Number($("split")?.value || 0)];
    if (!$("counts")) return;
    const there = Boolean(split && split.rows);
    $("counts").hidden = !there;
    $("counts").nextElementSibling.hidden = !there;
    if (!there) return;
    const many = split.labels.length;
    const paint = (k) => (many <= 10 ? data.classes[k] : `hsl(${Math.round((330 * k) / many)} 55% ${k % 2 ? 45 : 62}%)`);
    draw("counts", {
      grid: { left: 12, right: 20, top: many <= 30 ? 44 : 16, bottom: 34, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      legend: { show: many <= 30, type: "scroll", top: 0, textStyle: { color: colour("--ink") }, pageTextStyle: { color: colour("--ink") },
        pageIconColor: colour("--accent"), pageIconInactiveColor: colour("--line") },
      xAxis: axis(data.words.client, { type: "category", data: split.clients, nameGap: 28 }),
      yAxis: axis(data.words.rows, { nameLocation: "end", nameTextStyle: { color: colour("--soft"), align: "right" } }),
      tooltip: tooltip({ trigger: "item" }),
      series: split.labels.map((label, k) => ({
        type: "bar", stack: "rows", name: label, data: split.rows[k], itemStyle: { color: paint(k) }, barCategoryGap: "14%",
      })),
    });
    if (many <= 30) {
      fill($("counts-table"), [data.words.client, ...split.labels],
        split.clients.map((client, k) => [client, ...split.rows.map((row) => String(row[k]))]));
    }
  };

  const graph = () => {
    if (!$("graph") || !data.links.at) return;
    const size = Math.max(6, Math.min(26, 420 / data.links.at.length));
    draw("graph", {
      tooltip: tooltip({ formatter: (item) => element("span", item.dataType === "edge" ? item.name : `${data.words.node} ${item.name}`) }),
      series: [{
        type: "graph", layout: "none", roam: false, symbolSize: size, left: 20, right: 20, top: 20, bottom: 20,
        preserveAspect: true,
        edgeSymbol: ["none", data.links.directed ? "arrow" : "none"], edgeSymbolSize: 7,
        label: { show: size >= 16, color: "#fff", fontSize: 11 }, itemStyle: { color: data.colours[0] },
        lineStyle: { color: colour("--soft"), width: 1.2, opacity: 0.8 }, emphasis: { focus: "adjacency" },
        data: data.links.at.map(([x, y], k) => ({ name: String(k), x: 300 * x, y: 300 * y })),
        links: data.links.links.map(([a, b]) => ({ source: String(a), target: String(b) })),
      }],
    });
    fill($("graph-table"), [data.words.node, data.words.link],
      data.links.at.map((_, k) => [String(k), data.links.links.flatMap(([a, b]) => (a === k ? [b] : b === k && !data.links.directed ? [a] : [])).join(", ")]));
  };

  // -- tables ---------------------------------------------------------------------------------------
  const sort = (head) => {
    const index = [...head.parentNode.children].indexOf(head), body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.children[index].dataset.value ?? row.children[index].textContent;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)], [m, n] = [Number(x), Number(y)];
      const none = (text) => text === "–" || text.startsWith("– ");
      if (none(x) !== none(y)) return none(x) ? 1 : -1;  // without a value: last, whichever way
      const by = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y, undefined, { numeric: true }) : m - n;
      return up ? by : -by;
    };
    body.append(...[...body.rows].sort(order));
  };

  document.addEventListener("click", (event) => {
    const head = event.target.closest("table.sortable th[scope=col]");
    if (head && event.target.closest("button")) sort(head);
  });

  document.addEventListener("change", (event) => {
    if (event.target.id !== "split") return;
    document.querySelectorAll("[id^=split-]").forEach((table) => { table.hidden = table.id !== `split-${event.target.value}`; });
    partition();
  });

  // -- news, where the page is live -----------------------------------------------------------------
  const renew = async () => {
    const mark = $("live"), began = performance.now();
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const chosenSplit = $("split")?.value;
      document.querySelectorAll("[data-part]").forEach((part) => {
        const other = fresh.querySelector(`[data-part=${part.dataset.part}]`);
        if (other && other.innerHTML !== part.innerHTML && !part.contains(document.activeElement)) part.replaceChildren(...other.childNodes);
      });
      if (chosenSplit && $("split")) {
        $("split").value = chosenSplit;
        $("split").dispatchEvent(new Event("change", { bubbles: true }));
      }
      const news = read(fresh);
      if (JSON.stringify(news) !== JSON.stringify(data)) { data = news; all(); }
      mark.textContent = data.words.Live;
      mark.classList.remove("lost");
    } catch {
      mark.textContent = data.words["connection lost"];
      mark.classList.add("lost");
    }
    setTimeout(renew, Math.max(2000, 10 * (performance.now() - began)));  // so that reading never costs a run much
  };

  const all = () => { choices(); partition(); graph(); };
  $("curve-controls")?.addEventListener("submit", (event) => event.preventDefault());
  $("choice")?.addEventListener("change", choices);
  for (const id of ["place", "axis"]) $(id)?.addEventListener("change", () => { toggles(); curves(); });
  $("zero")?.addEventListener("change", curves);
  $("smoothing")?.addEventListener("input", () => { $("smoothing-value").textContent = $("smoothing").value; curves(); });
  $("show-all")?.addEventListener("click", () => { hidden.clear(); toggles(); curves(); });
  $("hide-all")?.addEventListener("click", () => { names().forEach((name) => hidden.add(name)); toggles(); curves(); });
  $("curve")?.addEventListener("keydown", along);
  dark.addEventListener("change", all);
  addEventListener("resize", () => Object.values(charts).forEach((chart) => chart.resize()));
  addEventListener("beforeprint", () => Object.values(charts).forEach((chart) => chart.resize()));
  all();
  if ("live" in document.body.dataset) setTimeout(renew, 2000);
})();
