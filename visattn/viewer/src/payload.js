// Arrays of the page: base64, then gzip, then one typed array for each chunk.

const KINDS = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, i32: Int32Array, f32: Float32Array };
const BYTES = { u8: 1, u16: 2, u32: 4, i32: 4, f16: 2, f32: 4 };

let halves = null;

// Value of every number in half precision, by its 16 bits.
function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 0) halves[bits] = sign * fraction * 2 ** -24;
    else if (exponent === 31) halves[bits] = fraction ? NaN : sign * Infinity;
    else halves[bits] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return halves;
}

function fromBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

export function bytesOf(text) {
  return fromBase64(text.trim());
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// Returns one array for each chunk. Half precision becomes Float32Array.
export async function arraysOf(chunks, text) {
  const buffer = await inflated(bytesOf(text));
  const arrays = [];
  let at = 0;
  for (const [kind, length] of chunks) {
    if (kind === "f16") {
      const bits = new Uint16Array(buffer, at, length);
      const table = halfTable();
      const values = new Float32Array(length);
      for (let i = 0; i < length; i++) values[i] = table[bits[i]];
      arrays.push(values);
    } else {
      arrays.push(new KINDS[kind](buffer, at, length));
    }
    at += Math.ceil((length * BYTES[kind]) / 4) * 4;
  }
  return arrays;
}
