// Reads a SEG and an RTSTRUCT file with dcmjs, as OHIF does, and prints names, colours and geometry as JSON.
//
//     node dicom_readers.mjs <folder with node_modules> <seg.dcm> <rtstruct.dcm>
import { createRequire } from "module";
import { readFileSync } from "fs";

const dcmjs = createRequire(process.argv[2] + "/")("dcmjs");

// The data set of a file with the names of its elements as keys.
function read(path) {
    const bytes = readFileSync(path);
    // Node may place a small file in a larger buffer that it shares with others.
    const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
    const file = dcmjs.data.DicomMessage.readFile(buffer);
    return dcmjs.data.DicomMetaDictionary.naturalizeDataset(file.dict);
}

// dcmjs gives an element with one value or one item without a list around it.
function list(value) {
    if (value === undefined) return [];
    return Array.isArray(value) ? value : [value];
}

// Decimal strings may come as texts.
const numbers = (value) => list(value).map(Number);

// Name, colour, number of voxels and centre of each segment of a SEG file.
function segments(path) {
    const seg = read(path);
    const shared = list(seg.SharedFunctionalGroupsSequence)[0];
    // Directions of a step along a row (first three numbers) and along a column (last three).
    const orientation = numbers(list(shared.PlaneOrientationSequence)[0].ImageOrientationPatient);
    // Distance of rows, then of columns, in mm.
    const spacing = numbers(list(shared.PixelMeasuresSequence)[0].PixelSpacing);
    // One bit a pixel, without padding between frames.
    const pixels = dcmjs.data.BitArray.unpack(list(seg.PixelData)[0]);
    const size = seg.Rows * seg.Columns;
    // Segment number to the number of its voxels and the sums of their x, y and z in mm.
    const sums = {};
    list(seg.PerFrameFunctionalGroupsSequence).forEach((group, frame) => {
        const number = list(group.SegmentIdentificationSequence)[0].ReferencedSegmentNumber;
        const start = numbers(list(group.PlanePositionSequence)[0].ImagePositionPatient);
        if (!sums[number]) sums[number] = [0, 0, 0, 0];
        const sum = sums[number];
        for (let index = 0; index < size; index++) {
            if (!pixels[frame * size + index]) continue;
            const row = Math.floor(index / seg.Columns);
            const column = index % seg.Columns;
            sum[0] += 1;
            // DICOM PS3.3 C.7.6.2.1.1: the centre of a pixel in the coordinates of the patient.
            for (let axis = 0; axis < 3; axis++) {
                sum[axis + 1] += start[axis] + column * spacing[1] * orientation[axis] + row * spacing[0] * orientation[axis + 3];
            }
        }
    });
    return list(seg.SegmentSequence).map((segment) => {
        const [count, ...sum] = sums[segment.SegmentNumber];
        const lab = numbers(segment.RecommendedDisplayCIELabValue);
        return {
            name: segment.SegmentLabel,
            colour: lab.length ? dcmjs.data.Colors.dicomlab2RGB(lab).map((value) => Math.round(255 * value)) : null,
            voxels: count,
            centre_xyz_mm: sum.map((value) => value / count),
        };
    });
}

// Name, colour, number of contours and bounding box of each structure of an RTSTRUCT file.
function contours(path) {
    const structureSet = read(path);
    const names = {};
    for (const roi of list(structureSet.StructureSetROISequence)) names[roi.ROINumber] = roi.ROIName;
    return list(structureSet.ROIContourSequence).map((item) => {
        // Of each contour x, y, z of its first point, then of the second, and so on.
        const points = list(item.ContourSequence).map((contour) => numbers(contour.ContourData));
        const coordinates = points.flat();
        // All x, all y and all z.
        const byAxis = [0, 1, 2].map((axis) => coordinates.filter((_, index) => index % 3 === axis));
        return {
            name: names[item.ReferencedROINumber],
            colour: numbers(item.ROIDisplayColor),
            contours: points.length,
            low_xyz_mm: byAxis.map((values) => Math.min(...values)),
            high_xyz_mm: byAxis.map((values) => Math.max(...values)),
        };
    });
}

console.log(JSON.stringify({ seg: segments(process.argv[3]), rtstruct: contours(process.argv[4]) }));
