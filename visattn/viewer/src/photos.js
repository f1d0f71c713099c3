// Sizes of photos, read without decoding them.

const STARTS = [0xc4, 0xc8, 0xcc]; // markers among those of frames that begin none

// Height and width that a PNG or JPEG file states, or null.
export function statedSize(bytes) {
  const view = new DataView(bytes);
  const length = bytes.byteLength;
  if (length > 24 && view.getUint32(0) === 0x89504e47) return [view.getUint32(20), view.getUint32(16)];
  if (length < 4 || view.getUint16(0) !== 0xffd8) return null;
  let at = 2;
  while (at + 9 < length && view.getUint8(at) === 0xff) {
    const marker = view.getUint8(at + 1);
    if (marker >= 0xc0 && marker <= 0xcf && !STARTS.includes(marker)) return [view.getUint16(at + 5), view.getUint16(at + 7)];
    at += marker === 0xff ? 1 : 2 + view.getUint16(at + 2); // 0xff may be repeated
  }
  return null;
}
