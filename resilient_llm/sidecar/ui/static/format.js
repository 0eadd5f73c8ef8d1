// Numbers as people read them; a dash stands for what is not known.

const NONE = "–";
const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });

export const count = (value) => (value === null ? NONE : value < 100000 ? whole.format(value) : short.format(value));
export const tokens = (value) => (value === null ? NONE : value < 10000 ? whole.format(value) : short.format(value));
export const rate = (value) => (value === undefined ? NONE : value >= 100 ? whole.format(Math.round(value)) : value.toFixed(1));
export const percent = (value) => (value === null || value === undefined ? NONE : `${value > 0 && value < 0.01 ? "<1" : Math.round(value * 100)} %`);
export const ratio = (value) => (value > 0.9995 ? "100 %" : `${(Math.floor(value * 1000) / 10).toFixed(1)} %`);
export const weight = (value) => String(Math.round(value * 100) / 100);
export const time = (seconds) => clock.format(new Date(seconds * 1000));
export const moment = (seconds) => date.format(new Date(seconds * 1000));

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 0.05) return "<0.1 ms";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 9995) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 59950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours > 0 ? `${hours} h ${minutes} min` : `${minutes} min ${seconds % 60} s`;
}

export function usd(value) {
  if (value === null) return NONE;
  if (value === 0) return "$0";
  if (value < 0.00005) return "<$0.0001";
  if (value < 0.1) return `$${value.toFixed(4)}`;
  return `$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
}
