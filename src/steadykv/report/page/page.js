// What every page has: the theme, the keys and their help. Parts add their own keys with `addKeys`.
"use strict";

const keyActions = new Map(); // key -> { press, release, words }
const addKeys = (actions) => {
  for (const [key, action] of Object.entries(actions)) keyActions.set(key, action);
};

// Every page has one SVG: its namespace is that of new elements.
const svgElement = (name) => document.createElementNS(document.querySelector("svg").namespaceURI, name);

{
  const root = document.documentElement;
  const button = document.querySelector(".theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = isDark() ? "☀ light" : "☾ dark"; };
  const toggle = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
  };
  button.onclick = toggle;
  button.hidden = false;
  system.addEventListener("change", label);
  label();

  const dialog = document.querySelector(".help");
  const help = () => {
    if (dialog.open) { dialog.close(); return; }
    const list = dialog.querySelector("dl");
    list.replaceChildren();
    for (const [key, { words }] of keyActions) {
      if (!words) continue;
      const name = document.createElement("dt");
      name.append(Object.assign(document.createElement("kbd"), { textContent: keyNames[key] ?? key }));
      list.append(name, Object.assign(document.createElement("dd"), { textContent: words }));
    }
    dialog.showModal();
  };
  const keyNames = { " ": "space", ArrowLeft: "←", ArrowRight: "→" };
  addKeys({
    t: { press: toggle, words: "dark or light" },
    "?": { press: help, words: "these keys" },
  });
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };

  // A focused control keeps the keys that it uses itself.
  const OWN_KEYS = [" ", "Enter", "ArrowLeft", "ArrowRight", "Home", "End"];
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = keyActions.get(event.key);
    const control = event.target.closest?.("button, select, summary, a, input");
    // A closed dialog's button keeps the focus until the next picture, without being there.
    const isInControl = control?.getClientRects().length && !control.matches(".timeline input");
    if (!action || (isInControl && OWN_KEYS.includes(event.key))) return;
    if (dialog.open && event.key !== "?" && event.key !== "t") return;
    event.preventDefault();
    action.press();
  });
  document.addEventListener("keyup", (event) => keyActions.get(event.key)?.release?.());
}
