// Plays several takes of the same length in step, in one of three views, with the flicker map above.
// Without scripts the page shows the plain videos instead. Events of the document: "frame" says what
// shows now, "seek" asks for another frame.
for (const theatre of document.querySelectorAll(".theatre")) {
  const facts = JSON.parse(theatre.dataset.film);
  // Frames are numbered from 0 here; everywhere else on the page `start` is the first.
  const { frames, width, height, firstFrame, start } = facts;
  const find = (selector) => theatre.querySelector(selector);
  const screens = [...theatre.querySelectorAll(".screen")].map((element) => ({
    glass: element.querySelector(".glass"),
    picture: element.querySelector("canvas.picture").getContext("2d"),
    heat: element.querySelector("canvas.heat").getContext("2d"),
    divider: element.querySelector(".divider"),
    badge: element.querySelector(".badge"),
    now: element.querySelector(".now"),
    psnr: JSON.parse(element.dataset.psnr),
  }));
  const reel = find(".reel");
  const source = reel ? new ReelSource(facts, reel) : new SheetSource(facts, [...theatre.querySelectorAll(".sheet")]);
  const scratch = newContext(source.mapWidth, source.mapHeight);
  for (const { heat } of screens) Object.assign(heat.canvas, { width: source.mapWidth, height: source.mapHeight });
  const state = { view: "picture", heat: false, gain: 8, bright: false, peek: false, wipe: 0.5 };
  const slider = find(".timeline input");

  const paintScreen = (screen, take) => {
    const { view, gain, peek, wipe } = state;
    const isCompared = take > 0 && !peek;
    const isDifference = isCompared && view === "difference";
    const isWiped = isCompared && view === "wipe";
    if (isDifference) {
      scratch.putImageData(greyImage(source.difference(take), gain, source.mapWidth, source.mapHeight), 0, 0);
      screen.picture.drawImage(scratch.canvas, 0, 0, width, height);
    }
    else source.paint(screen.picture, peek ? 0 : take);
    if (isWiped) {
      screen.picture.save();
      screen.picture.beginPath();
      screen.picture.rect(0, 0, Math.round(wipe * width), height);
      screen.picture.clip();
      source.paint(screen.picture, 0);
      screen.picture.restore();
      screen.divider.style.left = `${100 * wipe}%`;
    }
    screen.divider.hidden = !isWiped;
    const hasHeat = isCompared && state.heat;
    screen.heat.canvas.hidden = !hasHeat;
    if (hasHeat) screen.heat.putImageData(heatImage(source.heat(take), gain, source.mapWidth, source.mapHeight), 0, 0);
    screen.picture.canvas.classList.toggle("bright", state.bright && !isDifference);
    const words = peek && take > 0 ? ["original"] : [
      isDifference && `difference ×${gain}`, isWiped && "left: original", hasHeat && `flicker ×${gain}`,
    ].filter(Boolean);
    if (words.length) screen.badge.textContent = words.join(" · ");
    screen.badge.classList.toggle("on", words.length > 0);
    const value = screen.psnr[source.frame - firstFrame];
    screen.now.textContent = take === 0 ? "the original" : source.frame < firstFrame ? "given frame"
      : value === undefined ? "" : value === null ? "identical" : `${value.toFixed(1)} dB`;
  };

  const draw = () => {
    screens.forEach(paintScreen);
    theatre.dataset.drawn = source.drawn;
    slider.value = source.frame;
    find("output").innerHTML = `<span class="word">frame </span>${start + source.frame} / ${start + frames - 1}`;
    slider.setAttribute("aria-valuetext", `frame ${start + source.frame}`);
    find(".play").textContent = source.playing ? "❚❚" : "▶";
    find(".play").setAttribute("aria-label", source.playing ? "pause" : "play");
    const most = 255 / state.gain;
    find(".legend").hidden = !state.heat;
    find(".legend span").textContent = `0 to ${most >= 10 ? Math.round(most) : most.toFixed(1)} grey levels: how ` +
      `much the change from frame to frame differs from the original's, mean of ${facts.heatSteps} steps`;
    document.dispatchEvent(new CustomEvent("frame", { detail: start + source.frame }));
  };
  source.onframe = draw;

  const play = (on) => {
    if (on) source.play(); else source.pause();
    draw();
  };
  const seek = (frame) => {
    source.pause();
    source.seek(Math.max(0, Math.min(frames - 1, frame)));
    draw();
  };
  const step = (by) => seek(source.frame + by);
  const change = (part) => { Object.assign(state, part); draw(); };
  const press = (button, on) => button?.setAttribute("aria-pressed", String(on));
  const view = (name) => {
    for (const button of theatre.querySelectorAll("[data-view]")) press(button, button.dataset.view === name);
    for (const screen of screens.slice(1)) screen.glass.classList.toggle("wiping", name === "wipe");
    change({ view: name });
  };
  const toggleView = (name) => view(state.view === name ? "picture" : name);
  const heat = (on) => { press(find(".flicker"), on); change({ heat: on }); };
  const bright = (on) => { press(find(".light"), on); change({ bright: on }); };
  const peek = (on) => { if (state.peek !== on) change({ peek: on }); };

  find(".play").onclick = () => play(!source.playing);
  find(".back").onclick = () => step(-1);
  find(".forth").onclick = () => step(1);
  slider.oninput = () => seek(Number(slider.value));
  find(".speed").onchange = (event) => { source.speed = Number(event.target.value); };
  find(".light").onclick = () => bright(!state.bright);
  document.addEventListener("seek", (event) => seek(event.detail - start));
  // A control used by mouse or finger gives the keyboard back, so that space means play again.
  theatre.addEventListener("pointerup", (event) => event.target.closest("button")?.blur());
  theatre.addEventListener("change", (event) => event.target.closest("select")?.blur());
  addKeys({
    " ": { press: () => play(!source.playing), words: "play or pause" },
    ArrowLeft: { press: () => step(-1), words: "one frame back" },
    ArrowRight: { press: () => step(1), words: "one frame forward" },
    Home: { press: () => seek(0), words: "first frame" },
    End: { press: () => seek(frames - 1), words: "last frame" },
  });

  if (screens.length > 1) {
    find(".flicker").onclick = () => heat(!state.heat);
    find(".gain").onchange = (event) => {
      change({ gain: Number(event.target.value) });
      if (!state.heat && state.view !== "difference") view("difference");
    };
    for (const button of theatre.querySelectorAll("[data-view]")) button.onclick = () => view(button.dataset.view);
    const peekButton = find(".peek");
    peekButton.onpointerdown = (event) => { peekButton.setPointerCapture(event.pointerId); peek(true); };
    peekButton.onpointerup = peekButton.onpointercancel = () => peek(false);
    peekButton.oncontextmenu = (event) => event.preventDefault();
    for (const { glass } of screens.slice(1)) {
      const move = (event) => {
        if (state.view !== "wipe" || (event.pointerType !== "mouse" && !event.buttons)) return;
        const { left, width: shown } = glass.getBoundingClientRect();
        change({ wipe: Math.max(0, Math.min(1, (event.clientX - left) / shown)) });
      };
      glass.onpointerdown = (event) => { if (state.view === "wipe") glass.setPointerCapture(event.pointerId); move(event); };
      glass.onpointermove = move;
    }
    addKeys({
      d: { press: () => toggleView("difference"), words: "difference to the original" },
      w: { press: () => toggleView("wipe"), words: "wipe: the original on the left" },
      f: { press: () => heat(!state.heat), words: "flicker map" },
      b: { press: () => peek(true), release: () => peek(false), words: "hold: the original everywhere" },
    });
  }

  source.ready().then(() => {
    theatre.classList.add("playing-by-script");
    // "#frame=30" opens the page at that frame, "#wipe=30", "#difference=30" and "#flicker=30" in that view.
    const link = location.hash.match(/^#(frame|wipe|difference|flicker)=(\d+)$/);
    if (link && link[1] === "flicker") heat(true);
    else if (link && link[1] !== "frame") view(link[1]);
    if (link) seek(Number(link[2]) - start);
    else { draw(); if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play(true); }
  });
}
