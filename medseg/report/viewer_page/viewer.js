"use strict";
(async () => {
  const read = (id) => document.getElementById(id)?.textContent;
  const data = JSON.parse(read("data"));
  const readout = document.getElementById("place");
  const buttons = (name) => [...document.querySelectorAll(`button[data-${name}]`)];
  // Show one of the buttons of a group as pressed.
  const press = (group, pressed) => group.forEach((button) => button.setAttribute("aria-pressed", String(button === pressed)));

  const viewer = new niivue.Niivue({
    logLevel: "error", dragAndDropEnabled: false, isRadiologicalConvention: true, sagittalNoseLeft: true, crosshairWidth: 0.5,
    crosshairColor: [0.9, 0.9, 0.9, 0.6], isOrientationTextVisible: false, multiplanarShowRender: 0, tileMargin: 2,
    dragMode: niivue.DRAG_MODE.windowing, loadingText: "", clipPlaneHotKey: "", cycleClipPlaneHotKey: "", viewModeHotKey: "", scrollRequiresFocus: false,
  });
  // Label value to name, for the line below the slices.
  const names = { 0: "" };
  data.labels.forEach(({ name, value }) => { names[value] = name.replaceAll("_", " "); });
  const differenceNames = { 0: "" };
  data.differences.forEach(({ name, value }) => { differenceNames[value] = name; });
  // niivue draws the scan, the overlay draws the labels. It is null until the labels are read.
  let overlay = null;
  // Values are shown with the decimals of their steps: none in HU, three between 0 and 1. An image of one value may
  // have a step of 0.
  const numDecimals = Math.min(9, Math.max(0, -Math.floor(Math.log10(data.scan.value_step))));
  const rounded = (value) => Number(value.toFixed(numDecimals));
  viewer.onLocationChange = ({ mm, values }) => {
    if (overlay === null) return;
    const [x, y, z] = mm;  // niivue's world is RAS
    const { position } = overlay;
    const value = rounded(values[0].value);
    const parts = [
      data.is_ct ? `${value} HU` : `value ${value}`, names[overlay.labels.valueAt(position)] ?? "",
      differenceNames[overlay.differences?.valueAt(position) ?? 0] ?? "", `${(-x).toFixed(1)}, ${(-y).toFixed(1)}, ${z.toFixed(1)} mm (LPS)`,
    ];
    // Without empty parts; a true minus sign is as wide as a digit.
    readout.textContent = parts.filter(Boolean).join(" · ").replaceAll("-", "−");
  };

  const load = (name, options) => niivue.NVImage.loadFromBase64({ base64: read(`volume-${name}`), name: `${name}.nii.gz`, ...options });
  const readLabels = async (name) => (read(`volume-${name}`) ? new LabelBox((await load(name)).img, data.scan.labels) : null);

  const setPressed = (id, value) => document.getElementById(id)?.setAttribute("aria-pressed", String(value));
  // Set options of the overlay, show them in the buttons, and draw.
  const change = (options) => {
    Object.assign(overlay.options, options);
    setPressed("outline", overlay.options.hasOutlines);
    setPressed("differences", overlay.options.hasDifferences);
    document.getElementById("fill").value = Math.round(100 * overlay.options.fill);
    overlay.draw();
  };
  // Show the window in use, which may have been dragged, and press the button that has the same one.
  const showWindow = () => {
    const { cal_min: low, cal_max: high } = viewer.volumes[0];
    const number = data.windows.findIndex(({ range }) => range && Math.abs(range[0] - low) < 1 && Math.abs(range[1] - high) < 1);
    if (number >= 0) press(buttons("window"), buttons("window")[number]);
    document.getElementById("window").textContent = `W ${rounded(high - low)} L ${rounded((low + high) / 2)}`.replaceAll("-", "−");
  };
  // niivue's number of each plane (0 axial, 1 coronal, 2 sagittal), and its place: left, top, width and height as shares.
  const views = {
    axial: [[0, [0, 0, 1, 1]]], coronal: [[1, [0, 0, 1, 1]]], sagittal: [[2, [0, 0, 1, 1]]],
    multi: [[0, [0, 0, 0.5, 0.5]], [1, [0.5, 0, 0.5, 0.5]], [2, [0, 0.5, 0.5, 0.5]]],
  };
  let view = "multi";
  const setView = (name) => {
    view = name;
    overlay.options.hasFront = name === "multi";
    viewer.setCustomLayout(views[name].map(([sliceType, position]) => ({ sliceType, position })));
    press(buttons("view"), buttons("view").find((button) => button.dataset.view === name));
  };
  let windowNumber = 0;
  const setWindow = (number) => {
    windowNumber = number % data.windows.length;
    const volume = viewer.volumes[0];
    [volume.cal_min, volume.cal_max] = data.windows[windowNumber].range ?? [volume.robust_min, volume.robust_max];
    viewer.updateGLVolume();
    press(buttons("window"), buttons("window")[windowNumber]);
  };
  // Move the crosshair to a point in fractions of the volume.
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
  // Go some slices further, along niivue's axis (x, y, z) across the plane of the view.
  const step = (number) => {
    const movedAxis = { axial: 2, multi: 2, coronal: 1, sagittal: 0 }[view];
    viewer.moveCrosshairInVox(...[0, 1, 2].map((axis) => (axis === movedAxis ? number : 0)));
    viewer.drawScene();
  };
  const setFill = (fill) => change({ fill: Math.min(1, Math.max(0, fill)), hasLabels: true });
  // Key to what it does; "=" is the key of "+" without shift.
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
    readout.textContent = `This browser cannot show the scan (${error.message}); it needs WebGL 2.`;
    throw error;
  }
  const onClick = (name, action) => buttons(name).forEach((button) => button.addEventListener("click", () => action(button.dataset[name])));
  onClick("view", setView);
  onClick("window", (number) => setWindow(Number(number)));
  onClick("place", (number) => jump(Number(number)));
  document.getElementById("fill").addEventListener("input", (event) => setFill(event.target.value / 100));
  document.getElementById("outline").addEventListener("click", actions.o);
  document.getElementById("differences")?.addEventListener("click", actions.d);
  // Each time niivue draws, as after a turn of the wheel or a new size of the window, the overlay is drawn too.
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
    // Arrows move the slider of the fill when it has the focus; shortcuts of the browser stay too.
    const isForInput = event.target.matches?.("input") && event.key.startsWith("Arrow");
    const isForBrowser = event.ctrlKey || event.metaKey || event.altKey;
    if (isForInput || isForBrowser || !actions[event.key]) return;
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
