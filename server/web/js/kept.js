/** What a reload shows again, in the session storage. Storage may be denied, as within a frame: the reload then starts anew. */

/** Keep `value` under a name for the address as it is now; null keeps nothing. */
export function keep(name, value) {
  try {
    if (value) sessionStorage.setItem(name, JSON.stringify({ hash: location.hash, value }));
    else sessionStorage.removeItem(name);
  } catch { /* denied or full */ }
}

/** Take what was kept for this address; null if there is nothing. */
export function takeKept(name) {
  try {
    const kept = JSON.parse(sessionStorage.getItem(name));
    sessionStorage.removeItem(name);
    return kept?.hash === location.hash ? kept.value : null;
  } catch {
    return null; // denied
  }
}
