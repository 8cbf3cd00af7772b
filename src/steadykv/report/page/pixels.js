// Pixel arithmetic of the views. Pictures are RGBA bytes; maps are grey levels of 0 to 255, one a pixel.

// Mean over R, G and B of |a - b|.
const differenceMap = (a, b) => {
  const map = new Float32Array(a.length / 4);
  for (let i = 0, p = 0; p < map.length; i += 4, p++)
    map[p] = (Math.abs(a[i] - b[i]) + Math.abs(a[i + 1] - b[i + 1]) + Math.abs(a[i + 2] - b[i + 2])) / 3;
  return map;
};

// Mean over R, G and B of |(v1 - v0) - (r1 - r0)|: the error of one step in time.
const stepErrorMap = (v0, v1, r0, r1) => {
  const map = new Float32Array(v0.length / 4);
  for (let i = 0, p = 0; p < map.length; i += 4, p++) {
    let sum = 0;
    for (let c = i; c < i + 3; c++) sum += Math.abs(v1[c] - v0[c] - (r1[c] - r0[c]));
    map[p] = sum / 3;
  }
  return map;
};

const meanMap = (maps, size) => {
  const mean = new Float32Array(size);
  for (const map of maps) for (let p = 0; p < size; p++) mean[p] += map[p] / maps.length;
  return mean;
};

// A map as a film carries it: 255 * sqrt(level / 255) in the red channel.
const mapOfGreys = (data) => {
  const map = new Float32Array(data.length / 4);
  for (let i = 0, p = 0; p < map.length; i += 4, p++) map[p] = (data[i] * data[i]) / 255;
  return map;
};

const greyImage = (map, gain, width, height) => {
  const image = new ImageData(width, height);
  for (let p = 0, i = 0; p < map.length; p++, i += 4) {
    image.data[i] = image.data[i + 1] = image.data[i + 2] = map[p] * gain;
    image.data[i + 3] = 255;
  }
  return image;
};

// Transparent where nothing flickers, then purple, orange and pale yellow.
const HEAT_STOPS = [[0, [90, 20, 160, 0]], [0.25, [170, 30, 140, 170]], [0.6, [250, 110, 30, 225]], [1, [255, 245, 150, 255]]];
const heatColours = Array.from({ length: 256 }, (_, index) => {
  const value = index / 255;
  const end = Math.max(1, HEAT_STOPS.findIndex(([place]) => place >= value));
  const [from, low] = HEAT_STOPS[end - 1], [to, high] = HEAT_STOPS[end];
  return low.map((start, c) => start + ((high[c] - start) * (value - from)) / (to - from));
});
const heatImage = (map, gain, width, height) => {
  const image = new ImageData(width, height);
  for (let p = 0, i = 0; p < map.length; p++, i += 4)
    image.data.set(heatColours[Math.min(255, Math.round(map[p] * gain))], i);
  return image;
};
