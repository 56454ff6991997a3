"use strict";
(async () => {
  const read = (id) => document.getElementById(id)?.textContent;
  const data = JSON.parse(read("data"));
  const place = document.getElementById("place");
  const buttons = (name) => [...document.querySelectorAll(`button[data-${name}]`)];
  const press = (all, pressed) => all.forEach((one) => one.setAttribute("aria-pressed", String(one === pressed)));

  const viewer = new niivue.Niivue({
    logLevel: "error", dragAndDropEnabled: false, isRadiologicalConvention: true, sagittalNoseLeft: true, crosshairWidth: 0.5,
    crosshairColor: [0.9, 0.9, 0.9, 0.6], isOrientationTextVisible: false, multiplanarShowRender: 0, tileMargin: 2,
    dragMode: niivue.DRAG_MODE.windowing, loadingText: "", clipPlaneHotKey: "", cycleClipPlaneHotKey: "", viewModeHotKey: "", scrollRequiresFocus: false,
  });
  const names = { 0: "" };
  data.labels.forEach((one) => { names[one.value] = one.name.replaceAll("_", " "); });
  const differenceNames = { 0: "" };
  data.differences.forEach((one) => { differenceNames[one.value] = one.name; });
  let overlay = null;
  // The scan is drawn by niivue, the labels by the overlay.
  viewer.onLocationChange = ({ mm, values }) => {
    if (overlay === null) return;
    const [x, y, z] = mm;  // niivue's world is RAS
    const { position } = overlay;
    const value = Math.round(values[0].value);
    const parts = [
      data.is_ct ? `${value} HU` : `value ${value}`, names[overlay.labels.valueAt(position)] ?? "",
      differenceNames[overlay.differences?.valueAt(position) ?? 0] ?? "", `${(-x).toFixed(1)}, ${(-y).toFixed(1)}, ${z.toFixed(1)} mm (LPS)`,
    ];
    place.textContent = parts.filter(Boolean).join(" · ").replaceAll("-", "−");
  };

  const load = (name, options) => niivue.NVImage.loadFromBase64({ base64: read(`volume-${name}`), name: `${name}.nii.gz`, ...options });
  const readLabels = async (name) => (read(`volume-${name}`) ? new LabelBox((await load(name)).img, data.scan.labels) : null);

  const setPressed = (id, value) => document.getElementById(id)?.setAttribute("aria-pressed", String(value));
  const change = (options) => {
    Object.assign(overlay.options, options);
    setPressed("outline", overlay.options.hasOutlines);
    setPressed("differences", overlay.options.hasDifferences);
    document.getElementById("fill").value = Math.round(100 * overlay.options.fill);
    overlay.draw();
  };
  const showWindow = () => {
    const { cal_min: low, cal_max: high } = viewer.volumes[0];
    const range = buttons("window").findIndex((_, number) => {
      const [first, last] = data.windows[number].range ?? [];
      return Math.abs(first - low) < 1 && Math.abs(last - high) < 1;
    });
    if (range >= 0) press(buttons("window"), buttons("window")[range]);
    document.getElementById("window").textContent = `W ${Math.round(high - low)} L ${Math.round((low + high) / 2)}`.replaceAll("-", "−");
  };
  const views = {
    axial: [[0, [0, 0, 1, 1]]], coronal: [[1, [0, 0, 1, 1]]], sagittal: [[2, [0, 0, 1, 1]]],
    multi: [[0, [0, 0, 0.5, 0.5]], [1, [0.5, 0, 0.5, 0.5]], [2, [0, 0.5, 0.5, 0.5]]],
  };
  let view = "multi";
  const setView = (name) => {
    view = name;
    overlay.options.hasFront = name === "multi";
    viewer.setCustomLayout(views[name].map(([sliceType, position]) => ({ sliceType, position })));
    press(buttons("view"), buttons("view").find((one) => one.dataset.view === name));
  };
  let windowNumber = 0;
  const setWindow = (number) => {
    windowNumber = number % data.windows.length;
    const volume = viewer.volumes[0];
    [volume.cal_min, volume.cal_max] = data.windows[windowNumber].range ?? [volume.robust_min, volume.robust_max];
    viewer.updateGLVolume();
    press(buttons("window"), buttons("window")[windowNumber]);
  };
  const moveTo = (fraction) => {
    viewer.scene.crosshairPos = fraction;
    viewer.createOnLocationChange();
    viewer.drawScene();
  };
  let placeNumber = -1;
  const jump = (number) => {
    if (!data.places.length) return;
    placeNumber = number % data.places.length;
    moveTo(viewer.mm2frac(data.places[placeNumber].mm, 0, true));
  };
  const step = (number) => {
    const axis = { axial: 2, multi: 2, coronal: 1, sagittal: 0 }[view];
    viewer.moveCrosshairInVox(...[0, 1, 2].map((one) => (one === axis ? number : 0)));
    viewer.drawScene();
  };
  const setFill = (fill) => change({ fill: Math.min(1, Math.max(0, fill)), hasLabels: true });
  const actions = {
    m: () => setView("multi"), a: () => setView("axial"), c: () => setView("coronal"), s: () => setView("sagittal"),
    w: () => setWindow(windowNumber + 1), j: () => jump(placeNumber + 1), ArrowUp: () => step(1), ArrowDown: () => step(-1),
    "+": () => setFill(overlay.options.fill + 0.1), "=": () => setFill(overlay.options.fill + 0.1), "-": () => setFill(overlay.options.fill - 0.1),
    o: () => change({ hasOutlines: !overlay.options.hasOutlines }),
    h: () => change({ hasLabels: !overlay.options.hasLabels }),
    d: () => change({ hasDifferences: !overlay.options.hasDifferences }),
  };

  try {
    await viewer.attachToCanvas(document.getElementById("canvas"));
    const [low, high] = data.windows[0].range ?? [NaN, NaN];
    viewer.addVolume(await load("image", { cal_min: low, cal_max: high }));
    overlay = new Overlay(document.getElementById("overlay"), viewer, data, await readLabels("labels"), await readLabels("differences"));
  } catch (error) {
    place.textContent = `This browser cannot show the scan (${error.message}); it needs WebGL 2.`;
    throw error;
  }
  buttons("view").forEach((one) => one.addEventListener("click", () => setView(one.dataset.view)));
  buttons("window").forEach((one) => one.addEventListener("click", () => setWindow(Number(one.dataset.window))));
  buttons("place").forEach((one) => one.addEventListener("click", () => jump(Number(one.dataset.place))));
  document.getElementById("fill").addEventListener("input", (event) => setFill(event.target.value / 100));
  document.getElementById("outline").addEventListener("click", actions.o);
  document.getElementById("differences")?.addEventListener("click", actions.d);
  // Whatever makes niivue draw, such as a wheel or a new size of the window, moves the labels too.
  const drawScene = viewer.drawScene.bind(viewer);
  viewer.drawScene = () => {
    const result = drawScene();
    overlay.draw();
    showWindow();
    return result;
  };
  document.getElementById("canvas").addEventListener("pointerdown", (event) => {
    const index = overlay.indexAtFront(event.offsetX * overlay.scale, event.offsetY * overlay.scale);
    if (index) moveTo(overlay.fractionOf(index));
  });
  // Before niivue, which gives some letters another meaning.
  window.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches?.("input") && event.key.startsWith("Arrow");
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping || !actions[event.key]) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    actions[event.key]();
  }, true);
  setView("multi");
  if (data.places.length) jump(0);
  else viewer.createOnLocationChange();
  document.body.dataset.ready = "true";
  window.medsegViewer = viewer;
})();
