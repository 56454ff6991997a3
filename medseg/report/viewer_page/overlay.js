"use strict";
// Overlay of niivue's slices: outlines and fills of the labels at the scan's resolution, letters of the patient's
// sides, and the labels seen from the front. Indices are (z, y, x) of the scan towards head, back and left.
//
// Planes in the order of niivue's `axCorSag`: the axis of the scan across the plane, those of its rows and columns, and
// the letters at its edges.
const PLANES = [
  { name: "axial", normal: 0, rows: 1, columns: 2, letters: { top: "A", bottom: "P", left: "R", right: "L" } },
  { name: "coronal", normal: 1, rows: 0, columns: 2, letters: { top: "H", bottom: "F", left: "R", right: "L" } },
  { name: "sagittal", normal: 2, rows: 0, columns: 1, letters: { top: "H", bottom: "F", left: "A", right: "P" } },
];
const LINE_PX = 1.4;
const INK = "#e6edf3";

// Marching squares: the edges of a cell (0 top, 1 right, 2 bottom, 3 left) that a line joins. The index tells which
// corners are inside the label: 8 upper left + 4 upper right + 2 lower right + 1 lower left.
const LINES = [
  [], [[3, 2]], [[2, 1]], [[3, 1]], [[0, 1]], [[0, 1], [3, 2]], [[0, 2]], [[3, 0]],
  [[3, 0]], [[0, 2]], [[3, 0], [2, 1]], [[0, 1]], [[3, 1]], [[2, 1]], [[3, 2]], [],
];
// Middle of each edge, (column, row) from the upper left corner.
const EDGES = [[0.5, 0], [1, 0.5], [0.5, 1], [0, 0.5]];

/** Outline of each label of a slice, halfway between voxel centres; label value to its path in (column, row). */
const outlinesOf = ({ values, rows, columns }) => {
  const paths = new Map();
  const valueAt = (row, column) => {
    const isOutside = row < 0 || column < 0 || row >= rows || column >= columns;
    return isOutside ? 0 : values[row * columns + column];
  };
  // One cell more on each side closes the lines of labels at the edge.
  for (let row = -1; row < rows; row += 1) {
    for (let column = -1; column < columns; column += 1) {
      const upperLeft = valueAt(row, column), upperRight = valueAt(row, column + 1);
      const lowerLeft = valueAt(row + 1, column), lowerRight = valueAt(row + 1, column + 1);
      // Most cells lie inside of a label, or outside of all.
      if (upperLeft === upperRight && upperLeft === lowerRight && upperLeft === lowerLeft) continue;
      for (const value of new Set([upperLeft, upperRight, lowerRight, lowerLeft])) {
        if (value === 0) continue;
        if (!paths.has(value)) paths.set(value, new Path2D());
        const corners = 8 * (upperLeft === value) + 4 * (upperRight === value) + 2 * (lowerRight === value) + (lowerLeft === value);
        for (const [from, to] of LINES[corners]) {
          paths.get(value).moveTo(column + EDGES[from][0], row + EDGES[from][1]);
          paths.get(value).lineTo(column + EDGES[to][0], row + EDGES[to][1]);
        }
      }
    }
  }
  return paths;
};

/** A label map of the page: values in a box of the scan, every `step`-th voxel. */
class LabelBox {
  constructor(values, { start, step, shape }) {
    Object.assign(this, { values, start, step, shape });
    // Distance in `values` of voxels that are neighbours along each axis.
    this.strides = [shape[1] * shape[2], shape[2], 1];
    // Plane to its last slice.
    this.slices = new Map();
  }

  /** Place of a voxel of the scan along an axis of the box; it may lie outside. */
  placeOf(index, axis) {
    return Math.round((index - this.start[axis]) / this.step);
  }

  isInside(place, axis) {
    return place >= 0 && place < this.shape[axis];
  }

  /** Label value at an index of the scan; 0 outside of the box. */
  valueAt(index) {
    const places = index.map((coordinate, axis) => this.placeOf(coordinate, axis));
    if (!places.every((place, axis) => this.isInside(place, axis))) return 0;
    return this.values[places.reduce((sum, place, axis) => sum + place * this.strides[axis], 0)];
  }

  /** Slice of a plane with its outlines; null where it lies outside of the box. The last one of each plane is kept. */
  sliceAt(plane, index) {
    const place = this.placeOf(index, plane.normal);
    if (!this.isInside(place, plane.normal)) return null;
    if (this.slices.get(plane)?.place === place) return this.slices.get(plane);
    const rows = this.shape[plane.rows], columns = this.shape[plane.columns];
    const slice = { place, rows, columns, values: new Uint8Array(rows * columns) };
    for (let row = 0; row < rows; row += 1) {
      const first = place * this.strides[plane.normal] + row * this.strides[plane.rows];
      for (let column = 0; column < columns; column += 1) {
        slice.values[row * columns + column] = this.values[first + column * this.strides[plane.columns]];
      }
    }
    slice.outlines = outlinesOf(slice);
    this.slices.set(plane, slice);
    return slice;
  }
}

/** A picture as a canvas of its size. */
const canvasOf = (picture) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: picture.width, height: picture.height });
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
};

/** Red, green and blue of `#rrggbb`. */
const rgbOf = (colour) => [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));

/** Picture of a slice in which each label has its colour; the canvas has a pixel for each voxel. */
const fillOf = ({ values, rows, columns }, colours) => {
  const picture = new ImageData(columns, rows);
  values.forEach((value, place) => {
    if (colours.has(value)) picture.data.set([...rgbOf(colours.get(value)), 255], 4 * place);
  });
  return canvasOf(picture);
};

/** The labels seen from the front, shaded by their slope: picture (head up) and the depth of each column of voxels. */
const frontOf = (box, colours, spacingMm) => {
  const [depth, height, width] = box.shape;
  // By column of voxels from front to back: index y of the first labelled voxel (NaN without one), and its label (0).
  const nearest = new Float32Array(depth * width).fill(NaN), seen = new Uint8Array(depth * width);
  for (let z = 0; z < depth; z += 1) {
    for (let y = 0; y < height; y += 1) {
      for (let x = 0; x < width; x += 1) {
        const value = box.values[z * box.strides[0] + y * box.strides[1] + x], place = z * width + x;
        if (value === 0 || seen[place] !== 0) continue;
        seen[place] = value;
        nearest[place] = y;
      }
    }
  }
  // Depths in whole voxels would be seen as terraces: they are averaged over the neighbours of the same label.
  const smooth = (z, x) => {
    let sum = 0, number = 0;
    for (let dz = -2; dz <= 2; dz += 1) {
      for (let dx = -2; dx <= 2; dx += 1) {
        const place = (z + dz) * width + x + dx;
        // A row outside of the picture has no `seen`, so it differs too.
        if (x + dx < 0 || x + dx >= width || seen[place] !== seen[z * width + x]) continue;
        sum += nearest[place];
        number += 1;
      }
    }
    return sum / number;
  };
  const smoothed = Float32Array.from(seen, (value, place) => (value ? smooth(Math.floor(place / width), place % width) : NaN));
  const [zMm, yMm, xMm] = spacingMm;
  // Change of the depth in mm per mm, between the places before and behind; 0 at the edge of a label.
  const slope = (place, step, mm) => {
    const change = (smoothed[place + step] - smoothed[place - step]) * yMm / (2 * mm);
    return Number.isFinite(change) ? change : 0;
  };
  const picture = new ImageData(width, depth);
  seen.forEach((value, place) => {
    if (!colours.has(value)) return;
    // Lambert's law: the product of the unit normal and the direction of the light, which comes from the front, from
    // above and from the left of the picture.
    const across = slope(place, 1, xMm), up = slope(place, width, zMm);
    const light = (0.8 - 0.45 * across + 0.4 * up) / Math.hypot(across, up, 1);
    const shade = 0.25 + 0.75 * Math.min(1, Math.max(0, light));
    const z = Math.floor(place / width), row = depth - 1 - z;  // the head is up
    picture.data.set([...rgbOf(colours.get(value)).map((part) => part * shade), 255], 4 * (row * width + place % width));
  });
  return { canvas: canvasOf(picture), nearest };
};

/** Everything that is drawn over niivue's canvas. */
class Overlay {
  constructor(canvas, viewer, data, labels, differences) {
    Object.assign(this, { canvas, viewer, data, labels, differences });
    this.context = canvas.getContext("2d");
    const coloursOf = (structures) => new Map(structures.map(({ value, colour }) => [value, colour]));
    this.labelColours = coloursOf(data.labels);
    this.differenceColours = coloursOf(data.differences);
    this.front = frontOf(labels, this.labelColours, data.scan.spacing_mm);
    this.options = { fill: 0, hasOutlines: true, hasLabels: true, hasDifferences: true, hasFront: true };
  }

  /** Index of the scan, not rounded, at niivue's fraction of the volume, whose axes go to right, front and head. */
  indexOf([right, front, head]) {
    const [depth, height, width] = this.data.scan.padded_shape;
    return [head * depth - 0.5, (1 - front) * height - 0.5, (1 - right) * width - 0.5];
  }

  /** Inverse of `indexOf`. */
  fractionOf([z, y, x]) {
    const [depth, height, width] = this.data.scan.padded_shape;
    return [1 - (x + 0.5) / width, 1 - (y + 0.5) / height, (z + 0.5) / depth];
  }

  /** Index of the voxel at the crosshair. */
  get position() {
    const { shape } = this.data.scan;
    const index = this.indexOf(this.viewer.scene.crosshairPos);
    return index.map((coordinate, axis) => Math.min(shape[axis] - 1, Math.max(0, Math.round(coordinate))));
  }

  /** Pixel of the canvas at an index, on one of niivue's slices. */
  pixelOf(tile, index) {
    const mm = this.viewer.frac2mm(this.fractionOf(index));
    // By plane, the world coordinates across the slice and upwards.
    const [across, up] = [[mm[0], mm[1]], [mm[0], mm[2]], [mm[1], mm[2]]][tile.axCorSag];
    const [left, top, width, height] = tile.leftTopWidthHeight;
    return [
      left + width * (across - tile.leftTopMM[0]) / tile.fovMM[0],
      top + height * (1 - (up - tile.leftTopMM[1]) / tile.fovMM[1]),
    ];
  }

  /** Map from (column, row) of a slice of a label box to the pixels of the canvas. */
  matrixOf(tile, plane, box, place) {
    const pixelAt = (column, row) => {
      const index = [0, 0, 0];
      index[plane.normal] = box.start[plane.normal] + place * box.step;
      index[plane.columns] = box.start[plane.columns] + column * box.step;
      index[plane.rows] = box.start[plane.rows] + row * box.step;
      return this.pixelOf(tile, index);
    };
    // An affine map is known from the images of the origin and of a step along each axis.
    const [x, y] = pixelAt(0, 0), [columnX, columnY] = pixelAt(1, 0), [rowX, rowY] = pixelAt(0, 1);
    return new DOMMatrix([columnX - x, columnY - y, rowX - x, rowY - y, x, y]);
  }

  draw() {
    const { context, canvas, viewer } = this;
    const source = viewer.gl.canvas;
    // Pixels of the canvas for one of the page: larger than 1 on a screen with high resolution.
    this.scale = source.width / source.clientWidth;
    if (canvas.width !== source.width) canvas.width = source.width;
    if (canvas.height !== source.height) canvas.height = source.height;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    const position = this.position;
    for (const tile of viewer.screenSlices) {
      const plane = PLANES[tile.axCorSag];
      // The width of a mirrored tile is negative.
      const [left, top, width, height] = tile.leftTopWidthHeight;
      const box = { left: Math.min(left, left + width), top, width: Math.abs(width), height };
      context.save();
      context.beginPath();
      context.rect(box.left, box.top, box.width, box.height);
      context.clip();
      this.drawLabels(tile, plane, position[plane.normal]);
      context.restore();
      const number = position[plane.normal] + 1, count = this.data.scan.shape[plane.normal];
      this.drawLetters(box, plane.letters, `${plane.name} ${number}/${count}`);
    }
    if (this.options.hasFront) this.drawFront(position);
  }

  /** Fill and outline the labels, and fill the differences, on a slice of niivue. */
  drawLabels(tile, plane, index) {
    const { context, options } = this;
    const drawFill = (box, colours, opacity) => {
      const slice = opacity > 0 && box?.sliceAt(plane, index);
      if (!slice) return;
      context.save();
      context.globalAlpha = opacity;
      context.imageSmoothingEnabled = false;
      context.setTransform(this.matrixOf(tile, plane, box, slice.place));
      context.drawImage(fillOf(slice, colours), -0.5, -0.5);  // a voxel lies around its index
      context.restore();
    };
    if (options.hasLabels) drawFill(this.labels, this.labelColours, options.fill);
    if (options.hasDifferences) drawFill(this.differences, this.differenceColours, 0.7);
    const slice = options.hasLabels && options.hasOutlines && this.labels.sliceAt(plane, index);
    if (!slice) return;
    context.lineWidth = LINE_PX * this.scale;
    context.lineCap = "round";
    for (const [value, outline] of slice.outlines) {
      // The line keeps its width, however large the voxels are drawn.
      const path = new Path2D();
      path.addPath(outline, this.matrixOf(tile, plane, this.labels, slice.place));
      context.strokeStyle = this.labelColours.get(value) ?? INK;
      context.stroke(path);
    }
  }

  /** Letters of the patient's sides at the edges of a box, and a caption in its lower left corner. */
  drawLetters({ left, top, width, height }, letters, caption) {
    const margin = 5 * this.scale;
    const write = (text, x, y, align, baseline, px, weight) => {
      const { context } = this;
      Object.assign(context, { textAlign: align, textBaseline: baseline, font: `${weight} ${px * this.scale}px system-ui, sans-serif` });
      Object.assign(context, { lineWidth: 3 * this.scale, strokeStyle: "#000", fillStyle: INK, lineJoin: "round" });
      context.strokeText(text, x, y);
      context.fillText(text, x, y);
    };
    const middle = left + width / 2, centre = top + height / 2;
    write(letters.top, middle, top + margin, "center", "top", 14, 700);
    write(letters.bottom, middle, top + height - margin, "center", "bottom", 14, 700);
    write(letters.left, left + margin, centre, "left", "middle", 14, 700);
    write(letters.right, left + width - margin, centre, "right", "middle", 14, 700);
    // Above the row of the lower letter, which it would meet on a phone.
    write(caption, left + margin, top + height - margin - 16 * this.scale, "left", "bottom", 11, 400);
  }

  /** Place of the labels seen from the front, in the fourth quadrant. */
  get frontBox() {
    const { canvas, labels, data } = this;
    const [zMm, , xMm] = data.scan.spacing_mm;
    const width = labels.shape[2] * xMm, height = labels.shape[0] * zMm;
    // As large as fits into the quadrant, with a margin of a tenth on each side.
    const scale = 0.8 * Math.min(canvas.width / 2 / width, canvas.height / 2 / height);
    const box = { width: width * scale, height: height * scale };
    return { ...box, left: canvas.width * 0.75 - box.width / 2, top: canvas.height * 0.75 - box.height / 2 };
  }

  /** Draw the labels seen from the front, with lines at the position. */
  drawFront(position) {
    const { context, canvas, labels } = this;
    const box = this.frontBox;
    context.imageSmoothingEnabled = true;
    context.drawImage(this.front.canvas, box.left, box.top, box.width, box.height);
    // A vertical line at the sagittal slice and a horizontal one at the axial slice, in voxels of the label box.
    const [across, up] = [2, 0].map((axis) => (position[axis] - labels.start[axis]) / labels.step + 0.5);
    const x = box.left + box.width * across / labels.shape[2], y = box.top + box.height * (1 - up / labels.shape[0]);
    const quadrant = { left: canvas.width / 2, top: canvas.height / 2, width: canvas.width / 2, height: canvas.height / 2 };
    context.save();
    context.beginPath();
    context.rect(quadrant.left, quadrant.top, quadrant.width, quadrant.height);
    context.clip();
    context.beginPath();
    context.moveTo(quadrant.left, y);
    context.lineTo(canvas.width, y);
    context.moveTo(x, quadrant.top);
    context.lineTo(x, canvas.height);
    Object.assign(context, { strokeStyle: "rgb(230 230 230 / .6)", lineWidth: 0.8 * this.scale });
    context.stroke();
    context.restore();
    this.drawLetters(quadrant, PLANES[1].letters, "labels from the front");
  }

  /**
   * Index on the surface of the labels that a point of the fourth quadrant, in pixels of the canvas, stands for.
   * Beside the labels it keeps the y of the position; null outside of the quadrant or of the picture.
   */
  indexAtFront(x, y) {
    const { labels, canvas } = this;
    if (!this.options.hasFront || x < canvas.width / 2 || y < canvas.height / 2) return null;
    const box = this.frontBox;
    const column = Math.floor(labels.shape[2] * (x - box.left) / box.width);
    const row = Math.floor(labels.shape[0] * (1 - (y - box.top) / box.height));
    if (!labels.isInside(row, 0) || !labels.isInside(column, 2)) return null;
    const nearest = this.front.nearest[row * labels.shape[2] + column];
    const index = [row, nearest, column].map((place, axis) => labels.start[axis] + place * labels.step);
    return Number.isNaN(nearest) ? [index[0], this.position[1], index[2]] : index;
  }
}
