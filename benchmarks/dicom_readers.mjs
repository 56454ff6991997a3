// Reads a SEG and an RTSTRUCT file with dcmjs, as OHIF does, and prints names, colours and geometry as JSON.
//
//     node dicom_readers.mjs <folder with node_modules> <seg.dcm> <rtstruct.dcm>
import { createRequire } from "module";
import { readFileSync } from "fs";

const dcmjs = createRequire(process.argv[2] + "/")("dcmjs");

function read(path) {
    const bytes = readFileSync(path);
    const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
    const file = dcmjs.data.DicomMessage.readFile(buffer);
    return dcmjs.data.DicomMetaDictionary.naturalizeDataset(file.dict);
}

const list = (value) => (value === undefined ? [] : Array.isArray(value) ? value : [value]);
const numbers = (value) => list(value).map(Number);

function segments(path) {
    const seg = read(path);
    const shared = list(seg.SharedFunctionalGroupsSequence)[0];
    const orientation = numbers(list(shared.PlaneOrientationSequence)[0].ImageOrientationPatient);
    const spacing = numbers(list(shared.PixelMeasuresSequence)[0].PixelSpacing);
    const pixels = dcmjs.data.BitArray.unpack(list(seg.PixelData)[0]);
    const size = seg.Rows * seg.Columns;
    const sums = {};
    list(seg.PerFrameFunctionalGroupsSequence).forEach((group, frame) => {
        const number = list(group.SegmentIdentificationSequence)[0].ReferencedSegmentNumber;
        const start = numbers(list(group.PlanePositionSequence)[0].ImagePositionPatient);
        const sum = (sums[number] = sums[number] || [0, 0, 0, 0]);
        for (let index = 0; index < size; index++) {
            if (!pixels[frame * size + index]) continue;
            const row = Math.floor(index / seg.Columns), column = index % seg.Columns;
            sum[0] += 1;
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

function contours(path) {
    const set = read(path);
    const names = Object.fromEntries(list(set.StructureSetROISequence).map((roi) => [roi.ROINumber, roi.ROIName]));
    return list(set.ROIContourSequence).map((item) => {
        const points = list(item.ContourSequence).map((contour) => numbers(contour.ContourData));
        const all = points.flat();
        const mean = [0, 1, 2].map((axis) => all.filter((_, index) => index % 3 === axis));
        return {
            name: names[item.ReferencedROINumber],
            colour: numbers(item.ROIDisplayColor),
            contours: points.length,
            low_xyz_mm: mean.map((values) => Math.min(...values)),
            high_xyz_mm: mean.map((values) => Math.max(...values)),
        };
    });
}

console.log(JSON.stringify({ seg: segments(process.argv[3]), rtstruct: contours(process.argv[4]) }));
