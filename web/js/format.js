/** Numbers for people. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  const power = count < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(count) / 10));
  const value = count / 1024 ** power;
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[power]}`;
}

export function seconds(value) {
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

export function percent(share) {
  const value = 100 * share;
  return `${value < 10 && value > 0 ? value.toFixed(1) : Math.round(value)} %`;
}

export function rate(value) {
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}

/** How `now` compares to `before`: "2.1× less", "1.3× more". */
export function ratio(now, before, [less, more]) {
  if (!now || !before) return "";
  const factor = before / now;
  if (Math.abs(factor - 1) < 0.005) return "the same";
  return factor > 1 ? `${factor.toFixed(2)}× ${less}` : `${(1 / factor).toFixed(2)}× ${more}`;
}
