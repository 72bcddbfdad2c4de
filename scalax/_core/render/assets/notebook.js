// Moves all new notebook output of one version (PART) into shadow roots. It searches the document, because a script
// cannot find its own position in every notebook.

// Returns the color scheme of the notebook, from its background: themes of notebooks may differ from the system.
function schemeBehind(host) {
  if (getComputedStyle(host).colorScheme !== 'normal') return 'inherit';
  for (let node = host.parentElement; node; node = node.parentElement) {
    const [red, green, blue, alpha = 1] = getComputedStyle(node).backgroundColor.match(/[\d.]+/g).map(Number);
    if (alpha > 0.5) return 0.3 * red + 0.6 * green + 0.1 * blue < 110 ? 'dark' : 'light';
  }
  return 'light dark';
}

for (const host of document.querySelectorAll(`[data-scalax="${PART}"]:not([data-enhanced])`)) {
  host.dataset.enhanced = '';
  host.style.colorScheme = schemeBehind(host);
  // Stops the notebook from treating keys typed here as its shortcuts.
  host.addEventListener('keydown', (event) => event.stopPropagation());
  const root = host.attachShadow({ mode: 'open' });
  root.innerHTML = `<style>${STYLE}</style><div class="blocks"></div>`;
  const blocks = root.querySelector('.blocks');
  blocks.append(...host.querySelector('.scalax-static').childNodes);
  enhance(blocks);
}
