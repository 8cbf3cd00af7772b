// Buttons that copy a table as Markdown or CSV, and a command as it is.
const copyText = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // Not allowed here (an old browser, a page inside a frame): the way of the old days.
  }
  const area = Object.assign(document.createElement("textarea"), { value: text, className: "off-screen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
};
// A cell in one line: small second lines follow in brackets, units behind the name of a column.
const cellText = (cell) => {
  const [detail, copy] = [cell.querySelector("small"), cell.cloneNode(true)];
  copy.querySelector("small")?.remove();
  const [main, second] = [copy.textContent, detail?.textContent ?? ""].map((text) => text.trim().replace(/\s+/g, " "));
  return second ? `${main} (${second})` : main;
};
const rowsOf = (table) => [...table.rows].map((row) => [...row.cells].map(cellText));
const asMarkdown = (table) => {
  const lines = rowsOf(table).map((row) => `| ${row.map((text) => text.replace(/\|/g, "\\|")).join(" | ")} |`);
  const rule = `|${[...table.rows[0].cells].map((_, index) => (index ? "---:|" : "---|")).join("")}`;
  return [lines[0], rule, ...lines.slice(1)].join("\n") + "\n";
};
const asCsv = (table) =>
  rowsOf(table).map((row) => row.map((text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text)).join(",")).join("\n") + "\n";

const copyButton = (words, text) => {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: words });
  button.onclick = async () => {
    await copyText(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = words; }, 1500);
  };
  return button;
};
for (const scroll of document.querySelectorAll(".scroll")) {
  const table = scroll.querySelector("table");
  const bar = Object.assign(document.createElement("p"), { className: "copies" });
  bar.append(copyButton("Copy as Markdown", () => asMarkdown(table)), copyButton("Copy as CSV", () => asCsv(table)));
  scroll.after(bar);
}
for (const command of document.querySelectorAll("pre")) {
  const bar = Object.assign(document.createElement("p"), { className: "copies" });
  bar.append(copyButton("Copy command", () => command.textContent));
  command.after(bar);
}
