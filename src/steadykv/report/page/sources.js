// Where the pixels of a theatre come from and what moves its time: `frame` is what shows now, `onframe`
// is called when another one does. `paint` draws a take, `difference` and `heat` give its maps.

const newContext = (width, height) =>
  Object.assign(document.createElement("canvas"), { width, height }).getContext("2d", { willReadFrequently: true });

const HOLD_MS = 900; // the last frame stays for a moment before the film starts again

// Takes as pictures of all their frames: every frame is at hand, so time is a number that a clock moves.
class SheetSource {
  constructor(facts, sheets) {
    Object.assign(this, facts, { sheets, frame: 0, playing: false, speed: 1, onframe: () => {} });
    [this.mapWidth, this.mapHeight] = [facts.width, facts.height];
    this.scratch = newContext(facts.width, facts.height);
    this.held = sheets.map(() => new Map()); // the latest frames' pixels, by take
  }
  ready() { return Promise.all(this.sheets.map((sheet) => sheet.decode())); }
  paint(context, take, frame = this.frame) {
    const { width, height, sheetColumns } = this;
    const x = (frame % sheetColumns) * width, y = Math.floor(frame / sheetColumns) * height;
    context.drawImage(this.sheets[take], x, y, width, height, 0, 0, width, height);
  }
  get drawn() { return this.frame; }
  pixels(take, frame) {
    const held = this.held[take];
    if (!held.has(frame)) {
      this.paint(this.scratch, take, frame);
      held.set(frame, this.scratch.getImageData(0, 0, this.width, this.height).data);
      if (held.size > this.heatSteps + 4) held.delete(held.keys().next().value);
    }
    return held.get(frame);
  }
  difference(take) { return differenceMap(this.pixels(take, this.frame), this.pixels(0, this.frame)); }
  heat(take) {
    const maps = [];
    for (let t = Math.max(1, this.frame - this.heatSteps + 1); t <= this.frame; t++)
      maps.push(stepErrorMap(this.pixels(take, t - 1), this.pixels(take, t), this.pixels(0, t - 1), this.pixels(0, t)));
    return meanMap(maps, this.width * this.height);
  }
  seek(frame) { this.frame = frame; this.onframe(); }
  play() {
    if (this.playing) return;
    this.playing = true;
    let last = performance.now(), owed = 0;
    const tick = (time) => {
      if (!this.playing) return;
      owed += Math.min(Math.max(0, time - last), 250) * this.speed;
      last = time;
      const isLast = this.frame === this.frames - 1;
      const duration = isLast ? HOLD_MS * this.speed : 1000 / this.fps;
      if (owed >= duration) {
        owed = isLast ? 0 : owed - duration;
        this.seek((this.frame + 1) % this.frames);
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }
  pause() { this.playing = false; }
}

// One film of tiles: each take and, below all but take 0, its two maps at half the size side by side.
class ReelSource {
  constructor(facts, film) {
    // A film shows what it was asked for a moment later: `drawn` is the frame of its picture.
    Object.assign(this, facts, { film, frame: 0, drawn: 0, playing: false, onframe: () => {} });
    this.tile = JSON.parse(film.dataset.tile);
    this.mapWidth = Math.ceil(facts.width / 2);
    this.mapHeight = Math.ceil(facts.height / 2);
    this.scratch = newContext(this.mapWidth, this.mapHeight);
  }
  async ready() {
    const { film } = this;
    if (film.readyState < 2) await new Promise((resolve, reject) => {
      film.addEventListener("loadeddata", resolve, { once: true });
      film.addEventListener("error", reject, { once: true });
    });
    film.controls = false;
    const shown = (time) => {
      const frame = Math.min(this.frames - 1, Math.round(time * this.fps));
      if (film.seeking && frame !== this.frame) return; // still a frame from before the seek
      this.frame = this.drawn = frame;
      this.onframe();
    };
    // A paused film may not call back after a seek; what it is asked for is there by then.
    film.addEventListener("seeked", () => requestAnimationFrame(() => {
      if (film.paused && !film.seeking) shown(this.frame / this.fps);
    }));
    if (!film.requestVideoFrameCallback) {
      film.addEventListener("timeupdate", () => shown(Math.floor(film.currentTime * this.fps) / this.fps));
      return;
    }
    const presented = (_, { mediaTime }) => { shown(mediaTime); film.requestVideoFrameCallback(presented); };
    film.requestVideoFrameCallback(presented);
  }
  set speed(value) { this.film.playbackRate = value; }
  corner(take) {
    const { columns, width, height } = this.tile;
    return [(take % columns) * width, Math.floor(take / columns) * (1.5 * height)];
  }
  paint(context, take) {
    const { width, height } = this, [x, y] = this.corner(take);
    context.drawImage(this.film, x, y, width, height, 0, 0, width, height);
  }
  // The map that lies this far right below the picture.
  map(take, right) {
    const { mapWidth, mapHeight } = this, [x, y] = this.corner(take);
    this.scratch.drawImage(this.film, x + right, y + this.tile.height, mapWidth, mapHeight, 0, 0, mapWidth, mapHeight);
    return mapOfGreys(this.scratch.getImageData(0, 0, mapWidth, mapHeight).data);
  }
  difference(take) { return this.map(take, 0); }
  heat(take) { return this.map(take, this.tile.width / 2); }
  // The middle of a frame: rounding cannot reach its neighbour.
  seek(frame) {
    this.frame = frame;
    this.film.currentTime = (frame + 0.5) / this.fps;
  }
  play() { this.playing = true; this.film.play().catch(() => { this.playing = false; this.onframe(); }); }
  pause() { this.playing = false; this.film.pause(); }
}
