export async function start(panel) { panel.textContent = "soon"; return {}; }
