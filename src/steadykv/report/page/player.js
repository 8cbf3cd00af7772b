// Plays several takes of the same length in step. Every frame of a take lies in one lossless
// picture (its sheet), so stepping is exact in every browser and differences are differences of
// the true pixels, not of a video codec. Without scripts the page shows the plain videos instead.
"use strict";
for (const theatre of document.querySelectorAll(".theatre")) {
  const { frames, width, height, sheetColumns, firstFrame, fps } = JSON.parse(theatre.dataset.film);
  const find = (selector) => theatre.querySelector(selector);
  const screens = [...theatre.querySelectorAll(".screen")].map((element) => ({
    sheet: element.querySelector(".sheet"),
    canvas: element.querySelector("canvas"),
    badge: element.querySelector(".badge"),
    now: element.querySelector(".now"),
    psnr: JSON.parse(element.dataset.psnr),
  }));
  const reference = screens[0];
  const scratch = Object.assign(document.createElement("canvas"), { width, height });
  const scratchContext = scratch.getContext("2d", { willReadFrequently: true });
  const state = { frame: 0, playing: false, speed: 1, view: "picture", gain: 8, light: 1, peek: false };
  const slider = find(".timeline input");
  const HOLD_MS = 900; // the last frame stays for a moment before the film starts again

  const pixels = (screen, frame) => {
    const x = (frame % sheetColumns) * width;
    const y = Math.floor(frame / sheetColumns) * height;
    scratchContext.drawImage(screen.sheet, x, y, width, height, 0, 0, width, height);
    return scratchContext.getImageData(0, 0, width, height);
  };

  const draw = () => {
    const { frame, view, gain, light, peek } = state;
    const original = pixels(reference, frame);
    for (const screen of screens) {
      const own = peek || screen === reference ? new ImageData(original.data.slice(), width, height) : pixels(screen, frame);
      const data = own.data;
      const isDifference = view === "difference" && !peek && screen !== reference;
      for (let i = 0; i < data.length; i += 4) {
        if (isDifference) {
          const gap = Math.abs(data[i] - original.data[i]) + Math.abs(data[i + 1] - original.data[i + 1]) +
            Math.abs(data[i + 2] - original.data[i + 2]);
          data[i] = data[i + 1] = data[i + 2] = (gap / 3) * gain;
        } else if (light !== 1) {
          for (let c = i; c < i + 3; c++) data[c] = 255 * Math.pow(data[c] / 255, 1 / light);
        }
      }
      screen.canvas.getContext("2d").putImageData(own, 0, 0);
      const shown = peek && screen !== reference ? "original" : isDifference ? `difference ×${gain}` : "";
      if (shown) screen.badge.textContent = shown;
      screen.badge.classList.toggle("on", Boolean(shown));
      const value = screen.psnr[frame - firstFrame];
      screen.now.textContent = screen === reference ? "the original"
        : frame < firstFrame ? "given frame" : value === null || value === undefined ? "identical" : `${value.toFixed(1)} dB`;
    }
    slider.value = frame;
    find("output").innerHTML = `<span class="word">frame </span>${frame} / ${frames - 1}`;
    find(".play").textContent = state.playing ? "❚❚" : "▶";
    find(".play").setAttribute("aria-label", state.playing ? "pause" : "play");
  };

  let last = 0, owed = 0;
  const tick = (time) => {
    if (!state.playing) return;
    owed += Math.min(time - last, 250) * state.speed;
    last = time;
    const isLast = state.frame === frames - 1;
    const duration = isLast ? HOLD_MS * state.speed : 1000 / fps;
    if (owed >= duration) {
      owed = isLast ? 0 : owed - duration;
      state.frame = (state.frame + 1) % frames;
      draw();
    }
    requestAnimationFrame(tick);
  };
  const play = (on) => {
    if (on && !state.playing) { last = performance.now(); owed = 0; requestAnimationFrame(tick); }
    state.playing = on;
    draw();
  };
  const seek = (frame) => { state.frame = Math.max(0, Math.min(frames - 1, frame)); draw(); };
  const step = (by) => { state.playing = false; seek(state.frame + by); };
  const peek = (on) => { if (state.peek !== on) { state.peek = on; draw(); } };
  const view = (name) => {
    state.view = name;
    for (const button of theatre.querySelectorAll("[data-view]"))
      button.setAttribute("aria-pressed", String(button.dataset.view === name));
    draw();
  };

  const peekButton = find(".peek");
  find(".play").onclick = () => play(!state.playing);
  find(".back").onclick = () => step(-1);
  find(".forth").onclick = () => step(1);
  slider.oninput = () => { state.playing = false; seek(Number(slider.value)); };
  find(".speed").onchange = (event) => { state.speed = Number(event.target.value); };
  find(".gain").onchange = (event) => { state.gain = Number(event.target.value); view("difference"); };
  find(".light").onclick = (event) => {
    state.light = state.light === 1 ? 1.8 : 1;
    event.target.setAttribute("aria-pressed", String(state.light !== 1));
    draw();
  };
  for (const button of theatre.querySelectorAll("[data-view]")) button.onclick = () => view(button.dataset.view);
  peekButton.onpointerdown = (event) => { peekButton.setPointerCapture(event.pointerId); peek(true); };
  peekButton.onpointerup = peekButton.onpointercancel = () => peek(false);
  peekButton.oncontextmenu = (event) => event.preventDefault();
  // A control used by mouse or finger gives the keyboard back, so that space means play again.
  theatre.addEventListener("pointerup", (event) => event.target.closest("button")?.blur());

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inControl = event.target.closest?.("button, select, summary, a");
    const actions = {
      " ": () => play(!state.playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1),
      Home: () => step(-frames), End: () => step(frames),
      d: () => view(state.view === "picture" ? "difference" : "picture"), b: () => peek(true),
    };
    const action = actions[event.key];
    if (!action || (inControl && [" ", "ArrowLeft", "ArrowRight"].includes(event.key))) return;
    event.preventDefault();
    action();
  });
  document.addEventListener("keyup", (event) => { if (event.key === "b") peek(false); });

  Promise.all(screens.map((screen) => screen.sheet.decode())).then(() => {
    theatre.classList.add("playing-by-script");
    // "#frame=30" opens the page at that frame, "#difference=30" in the difference view.
    const link = location.hash.match(/^#(frame|difference)=(\d+)$/);
    if (link) { view(link[1] === "difference" ? "difference" : "picture"); seek(Number(link[2])); }
    else { draw(); if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play(true); }
  });
}
