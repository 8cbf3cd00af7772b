// Figures by frame follow the players: a line stands at the frame that shows, and a click goes there.
for (const plot of document.querySelectorAll("svg[data-frames]")) {
  if (!document.querySelector(".theatre")) break;
  // The plane of the figure in its own units, and the frames at its left and right edge.
  const { left, right, top, bottom, first, last } = JSON.parse(plot.dataset.frames);
  const cursor = svgElement("line");
  cursor.classList.add("cursor");
  cursor.setAttribute("y1", top);
  cursor.setAttribute("y2", bottom);
  plot.append(cursor);
  plot.classList.add("linked");
  document.addEventListener("frame", (event) => {
    const place = left + ((event.detail - first) / (last - first)) * (right - left);
    const isInside = event.detail >= first && event.detail <= last;
    cursor.toggleAttribute("hidden", !isInside);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.dataset.frame = event.detail;
  });
  const go = (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    const frame = Math.round(first + ((place.x - left) / (right - left)) * (last - first));
    const within = Math.max(Math.ceil(first), Math.min(Math.floor(last), frame));
    document.dispatchEvent(new CustomEvent("seek", { detail: within }));
  };
  plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") plot.setPointerCapture(event.pointerId); });
  plot.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse" && event.buttons) go(event); });
  plot.addEventListener("click", go);
}
