"use strict";
(async () => {
  const read = (id) => document.getElementById(id)?.textContent;
  const data = JSON.parse(read("data"));
  const place = document.getElementById("place");
  const buttons = (name) => [...document.querySelectorAll(`button[data-${name}]`)];
  const press = (all, pressed) => all.forEach((one) => one.setAttribute("aria-pressed", String(one === pressed)));

  const viewer = new niivue.Niivue({
    logLevel: "error", dragAndDropEnabled: false, isRadiologicalConvention: true, isCornerOrientationText: true, crosshairWidth: 0.5,
    crosshairColor: [0.9, 0.9, 0.9, 0.6], fontColor: [0.85, 0.88, 0.9, 1], fontMinPx: 11, multiplanarShowRender: 0, tileMargin: 2,
    loadingText: "", atlasOutline: 1, clipPlaneHotKey: "", cycleClipPlaneHotKey: "", viewModeHotKey: "", scrollRequiresFocus: false,
  });
  const names = { 0: "" };
  data.labels.forEach((one) => { names[one.value] = one.name.replaceAll("_", " "); });
  const differenceNames = { 0: "" };
  data.differences.forEach((one) => { differenceNames[one.value] = one.name; });
  viewer.onLocationChange = ({ mm, values }) => {
    const [value, label, difference] = values.map((one) => Math.round(one.value));
    const [x, y, z] = mm;  // niivue's world is RAS
    const parts = [`${(-x).toFixed(1)}, ${(-y).toFixed(1)}, ${z.toFixed(1)} mm (LPS)`, `value ${value}`, names[label] ?? "", differenceNames[difference] ?? ""];
    place.textContent = parts.filter(Boolean).join(" · ");
  };

  const colours = (entries) => {
    const rgb = entries.map((one) => [1, 3, 5].map((start) => parseInt(one.colour.slice(start, start + 2), 16)));
    return {
      R: [0, ...rgb.map((one) => one[0])], G: [0, ...rgb.map((one) => one[1])], B: [0, ...rgb.map((one) => one[2])],
      A: [0, ...rgb.map(() => 255)], I: [0, ...entries.map((one) => one.value)], labels: ["", ...entries.map((one) => one.name)],
    };
  };
  const add = async (name, options, entries) => {
    const base64 = read(`volume-${name}`);
    if (!base64) return;
    const volume = await niivue.NVImage.loadFromBase64({ base64, name: `${name}.nii.gz`, ...options });
    if (entries) volume.setColormapLabel(colours(entries));
    viewer.addVolume(volume);
  };

  const differenceOpacity = 0.8;
  let labelOpacity = 0.35;
  let isOutlined = true;
  let hasLabels = true;
  let hasDifferences = data.differences.length > 0;
  const draw = () => {
    const shown = hasLabels ? labelOpacity : 0;
    viewer.volumes[1].opacity = shown;
    if (viewer.volumes[2]) viewer.volumes[2].opacity = hasDifferences ? differenceOpacity : 0;
    viewer.opts.atlasOutline = isOutlined && shown > 0 ? 1 : 0;
    viewer.updateGLVolume();
  };
  const views = {
    axial: viewer.sliceTypeAxial, coronal: viewer.sliceTypeCoronal, sagittal: viewer.sliceTypeSagittal, multi: viewer.sliceTypeMultiplanar,
  };
  let view = "multi";
  const setView = (name) => {
    view = name;
    viewer.setSliceType(views[name]);
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
  let placeNumber = -1;
  const jump = (number) => {
    if (!data.places.length) return;
    placeNumber = number % data.places.length;
    viewer.scene.crosshairPos = viewer.mm2frac(data.places[placeNumber].mm);
    viewer.createOnLocationChange();
    viewer.drawScene();
  };
  const step = (number) => {
    const axis = { axial: 2, multi: 2, coronal: 1, sagittal: 0 }[view];
    viewer.moveCrosshairInVox(...[0, 1, 2].map((one) => (one === axis ? number : 0)));
    viewer.drawScene();
  };
  const setOpacity = (value) => {
    labelOpacity = Math.min(1, Math.max(0, value));
    document.getElementById("opacity").value = Math.round(100 * labelOpacity);
    hasLabels = true;
    draw();
  };
  const toggle = (id, value) => document.getElementById(id)?.setAttribute("aria-pressed", String(value));
  const actions = {
    m: () => setView("multi"), a: () => setView("axial"), c: () => setView("coronal"), s: () => setView("sagittal"),
    w: () => setWindow(windowNumber + 1), j: () => jump(placeNumber + 1), ArrowUp: () => step(1), ArrowDown: () => step(-1),
    "+": () => setOpacity(labelOpacity + 0.1), "=": () => setOpacity(labelOpacity + 0.1), "-": () => setOpacity(labelOpacity - 0.1),
    o: () => { isOutlined = !isOutlined; toggle("outline", isOutlined); draw(); },
    h: () => { hasLabels = !hasLabels; draw(); },
    d: () => { hasDifferences = !hasDifferences; toggle("differences", hasDifferences); draw(); },
  };

  try {
    await viewer.attachToCanvas(document.getElementById("canvas"));
    const [low, high] = data.windows[0].range ?? [NaN, NaN];
    await add("image", { cal_min: low, cal_max: high });
    await add("labels", { opacity: labelOpacity }, data.labels);
    await add("differences", { opacity: differenceOpacity }, data.differences);
  } catch (error) {
    place.textContent = `This browser cannot show the scan (${error.message}); it needs WebGL 2.`;
    throw error;
  }
  buttons("view").forEach((one) => one.addEventListener("click", () => setView(one.dataset.view)));
  buttons("window").forEach((one) => one.addEventListener("click", () => setWindow(Number(one.dataset.window))));
  buttons("place").forEach((one) => one.addEventListener("click", () => jump(Number(one.dataset.place))));
  document.getElementById("opacity").addEventListener("input", (event) => setOpacity(event.target.value / 100));
  document.getElementById("outline").addEventListener("click", actions.o);
  document.getElementById("differences")?.addEventListener("click", actions.d);
  // Before niivue, which gives some letters another meaning.
  window.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches?.("input") && event.key.startsWith("Arrow");
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping || !actions[event.key]) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    actions[event.key]();
  }, true);
  if (data.places.length) jump(0);
  else viewer.createOnLocationChange();
  document.body.dataset.ready = "true";
  window.medsegViewer = viewer;
})();
