/* Colours before the first paint: what was chosen here, else what the system says. */
(() => {
  const key = "bishop-theme";
  const names = { auto: "as the system", light: "light", dark: "dark" };
  const order = Object.keys(names);

  const stored = () => {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // storage is switched off: the choice lasts as long as the page
    }
  };

  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const text = document.getElementById("theme-text");
    if (text) text.textContent = `Colours: ${names[theme]}`;
  };

  const next = () => {
    const now = document.documentElement.dataset.theme;
    const theme = order[(order.indexOf(now) + 1) % order.length];
    try {
      localStorage.setItem(key, theme);
    } catch {
      // see above
    }
    apply(theme);
  };

  const start = names[stored()] ? stored() : "auto";
  apply(start);
  document.addEventListener("DOMContentLoaded", () => {
    apply(start);
    document.getElementById("theme").addEventListener("click", next);
  });
})();
