const narrow = matchMedia('(max-width:640px)').matches;
const hovers = matchMedia('(hover:hover)').matches;

// Plotly's script and what it draws are stored compressed.
let FIGURES = {};
async function unpacked(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).text();
}

async function draw() {
  const script = document.createElement('script');
  try {
    script.textContent = await unpacked('plotly');
    FIGURES = JSON.parse(await unpacked('figures'));
    if (document.getElementById('rows')) {
      document.querySelector('.sortable tbody').insertAdjacentHTML('beforeend', await unpacked('rows'));
    }
  } catch {
    for (const plot of document.querySelectorAll('.plot')) {
      plot.textContent = 'This browser cannot unpack the figures. The PNG files next to this page show them.';
    }
    return;
  }
  document.head.append(script);
  for (const [id, figure] of Object.entries(FIGURES)) {
    if (narrow) {
      figure.layout.margin = {...figure.layout.margin, l: 48, r: 8};
      figure.layout.font.size = 11;
      if (id === 'figure-answer') {  // the sentence above says the rest
        for (const note of figure.layout.annotations) note.text = note.text.replace(/ .*/, '</b>');
      }
    }
    Plotly.newPlot(id, figure.data, figure.layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: hovers ? 'hover' : false,
      modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'],
      toImageButtonOptions: {format: 'svg', filename: id},
    });
  }
}
draw();

// The switch between the runs and far targets: a figure's `meta` has the axes of both views.
for (const button of document.querySelectorAll('.switch button')) {
  button.addEventListener('click', () => {
    for (const other of button.parentElement.children) other.setAttribute('aria-pressed', other === button);
    for (const [id, figure] of Object.entries(FIGURES)) {
      const view = figure.layout.meta && figure.layout.meta[button.value];
      if (view) Plotly.relayout(id, view);
    }
  });
}

// Tables sort by the numbers behind their cells.
for (const table of document.querySelectorAll('.sortable')) {
  table.tHead.addEventListener('click', event => {
    const head = event.target.closest('th');
    if (!head) return;
    const column = head.cellIndex, direction = head.dataset.dir === '1' ? -1 : 1, body = table.tBodies[0];
    for (const other of table.tHead.rows[0].cells) delete other.dataset.dir;
    head.dataset.dir = direction;
    const key = row => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
    };
    body.append(...[...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      const order = typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y));
      return direction * order;
    }));
  });
}
