// Arrows from the asking patch to the patch that each cache selects, over pictures that stand in a grid:
// where they stand depends on the width of the page. A click on a picture shows its frame in the players.
for (const look of document.querySelectorAll(".look.asks")) {
  const [asking, ...answers] = [...look.querySelectorAll("figure")];
  const layer = svgElement("svg");
  layer.classList.add("arrows");
  layer.setAttribute("aria-hidden", "true");
  const arrows = answers.map((answer) => {
    const group = svgElement("g");
    group.style.color = getComputedStyle(answer).getPropertyValue("--c");
    const halo = svgElement("path"), line = svgElement("path"), head = svgElement("path");
    halo.classList.add("halo");
    head.classList.add("head");
    group.append(halo, line, head);
    layer.append(group);
    const follow = (on) => { look.classList.toggle("following", on); group.classList.toggle("followed", on); };
    answer.addEventListener("pointerenter", () => follow(true));
    answer.addEventListener("pointerleave", () => follow(false));
    return { answer, group, lines: [halo, line], head };
  });
  look.append(layer);
  const place = () => {
    const own = look.getBoundingClientRect();
    const middle = (figure) => {
      const { left, top, width, height } = figure.querySelector("rect").getBoundingClientRect();
      return { x: left + width / 2 - own.left, y: top + height / 2 - own.top, radius: Math.max(width, height) / 2 };
    };
    layer.setAttribute("viewBox", `0 0 ${own.width} ${own.height}`);
    const from = middle(asking);
    for (const { answer, group, lines, head } of arrows) {
      group.style.color = getComputedStyle(answer).getPropertyValue("--c");
      const to = middle(answer);
      const [dx, dy] = [to.x - from.x, to.y - from.y];
      const length = Math.hypot(dx, dy) || 1;
      // Bent upwards, and ending at the edge of the patch, so that the patch itself stays visible.
      const bend = Math.min(60, 0.12 * length);
      const turn = { x: from.x + dx / 2, y: from.y + dy / 2 - bend };
      const run = Math.hypot(to.x - turn.x, to.y - turn.y) || 1;
      const ux = (to.x - turn.x) / run, uy = (to.y - turn.y) / run;
      const tip = { x: to.x - ux * (to.radius + 2), y: to.y - uy * (to.radius + 2) };
      const neck = { x: tip.x - ux * 9, y: tip.y - uy * 9 };
      for (const line of lines) line.setAttribute("d", `M${from.x},${from.y} Q${turn.x},${turn.y} ${neck.x},${neck.y}`);
      head.setAttribute("d", `M${tip.x},${tip.y} L${neck.x - uy * 5},${neck.y + ux * 5} L${neck.x + uy * 5},${neck.y - ux * 5} Z`);
    }
  };
  new ResizeObserver(place).observe(look);
  if (document.querySelector(".theatre")) for (const figure of [asking, ...answers]) {
    const svg = figure.querySelector("svg");
    svg.classList.add("seeks");
    svg.onclick = () => document.dispatchEvent(new CustomEvent("seek", { detail: Number(figure.dataset.frame) }));
  }
}
